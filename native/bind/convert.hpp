// SPDX-License-Identifier: MIT OR Apache-2.0
// Conversion: any array in CPU memory in, a result of the same kind out, without Python code.
//
// The exact type of an object says how it is converted: NumPy arrays and scalars by NumPy's C interface,
// torch tensors by their DLPack table, Python numbers as one element, JAX arrays and everything else with
// a buffer by the buffer protocol, the rest by __dlpack__. What is not converted here takes the general
// path, which converts it in Python (other devices, subclasses, conjugated views) or refuses it in words.
// All of this needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bind/arrays.hpp"
#include "bind/python.hpp"
#include "reduce/reduce.hpp"

namespace ferrodist::bind {

// The binary interface of DLPack 1: the records other libraries describe their arrays with.
namespace dlpack {

constexpr std::uint32_t major_version = 1;
constexpr std::int32_t device_cpu = 1;

enum Code : std::uint8_t { code_int = 0, code_uint = 1, code_float = 2, code_bfloat = 4, code_complex = 5, code_bool = 6 };

struct Version {
    std::uint32_t major, minor;
};

struct Tensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t num_axes;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;  // in elements; null strides: contiguous
    std::uint64_t byte_offset;
};

struct Managed {
    Tensor tensor;
    void* context;
    void (*deleter)(Managed*);
};

struct ManagedVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedVersioned*);
    std::uint64_t flags;
    Tensor tensor;
};

// What the capsule `__dlpack_c_exchange_api__` of a type points to.
struct ExchangeTable {
    Version version;
    ExchangeTable* previous;
    int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
    int (*managed_from_object)(void* object, ManagedVersioned** out);
    int (*object_from_managed)(ManagedVersioned* managed, void** out);
    int (*tensor_from_object)(void* object, Tensor* out);
    int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace dlpack

// What an object is. Messages carry it, so that what was sent comes back: ArrayKind of ferrodist.arrays.
enum class ArrayKind : std::uint8_t { none, numpy, numpy_scalar, number, torch, adapted, bytes, bytearray, python_array, memory, jax };
constexpr auto last_kind = ArrayKind::jax;

// What a file of ferrodist.arrays has registered for a type.
struct RegisteredType;

// Memory that another library lends through a capsule; given back at the end.
class Borrowed : core::NonCopyable {
public:
    ~Borrowed();

    // Takes the tensor of a DLPack capsule over; null if it is none.
    const dlpack::Tensor* take(PyObject* capsule);

private:
    dlpack::Managed* managed_ = nullptr;
    dlpack::ManagedVersioned* versioned_ = nullptr;
};

// An array the caller passes in.
class InputArray : public ArrayView, core::NonCopyable {
public:
    // False: the object takes the general path. Keeps what it needs alive, but not the object itself.
    bool read(PyObject* object);

    // What a receiver is told that it is; adapted arrays are told by their library.
    ArrayKind sent_kind() const;

    ArrayKind kind = ArrayKind::none;
    PyObject* object = nullptr;
    const RegisteredType* type = nullptr;
    // The caller's own memory, which a packed copy is not part of.
    const std::byte *begin = nullptr, *end = nullptr;

private:
    friend class OutputArray;

    bool read_numpy(PyObject* array);
    bool read_number();
    bool read_torch();
    bool read_buffer();
    bool read_dlpack();
    bool view(const dlpack::Tensor& tensor);
    bool pack(const std::ptrdiff_t* strides);

    nanobind::object owner_;
    Borrowed borrowed_;
    std::unique_ptr<std::byte[]> packed_;
    alignas(16) std::byte number_[16];
};

// The place of a result: a new array of the kind of an input, or the caller's `out`.
class OutputArray : public ArrayView, core::NonCopyable {
public:
    // False: the general path. Keeps the object alive.
    bool read(PyObject* out);
    bool make(const InputArray& like, int num_axes, const std::ptrdiff_t* shape);
    // A new NumPy array, where there is no input to go by.
    bool make_numpy(DType dtype, int num_axes, const std::ptrdiff_t* shape);

    // The object the caller gets, when the memory is complete.
    nanobind::object finish(PyObject* input);

private:
    bool show_numpy(nanobind::object array);
    bool make_torch(const InputArray& like, int num_axes, const std::ptrdiff_t* lengths);
    bool read_torch();

    ArrayKind kind_ = ArrayKind::none;
    const RegisteredType* type_ = nullptr;
    bool is_out_ = false;
    nanobind::object owner_;
    alignas(16) std::byte number_[16];
};

// The Python number of one element, whose dtype is that of one.
nanobind::object number_of(const std::byte* data, DType dtype);

}  // namespace ferrodist::bind
