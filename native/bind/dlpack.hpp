// SPDX-License-Identifier: MIT OR Apache-2.0
// The binary interface of DLPack 1: the records other libraries describe their arrays with.
#pragma once

#include <cstdint>

namespace ferrodist::bind::dlpack {

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

}  // namespace ferrodist::bind::dlpack
