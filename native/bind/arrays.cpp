// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/arrays.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "bind/python.hpp"
#include "core/memory.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

// NumPy learns of bfloat16 from the package ml_dtypes, which gives it a number of its own.
bool is_bfloat16(const PyArrayObject* array) {
    static int known = -1;  // with the GIL held
    const int number = PyArray_TYPE(array);
    if (number < NPY_USERDEF || number == known) {
        return number == known;
    }
    const char* name = PyArray_DESCR(array)->typeobj->tp_name;
    if (std::strcmp(name, "ml_dtypes.bfloat16") != 0 && std::strcmp(name, "bfloat16") != 0) {
        return false;
    }
    known = number;
    return true;
}

std::optional<DType> dtype_of(int number, std::size_t size) {
    switch (number) {
        case NPY_BOOL: return DType::boolean;
        case NPY_HALF: return DType::float16;
        case NPY_FLOAT: return DType::float32;
        case NPY_DOUBLE: return DType::float64;
        case NPY_CFLOAT: return DType::complex64;
        case NPY_CDOUBLE: return DType::complex128;
        default: break;
    }
    if (!PyTypeNum_ISINTEGER(number) || size > 8) {
        return std::nullopt;
    }
    // Several numbers of NumPy stand for one size.
    const auto first = static_cast<int>(PyTypeNum_ISSIGNED(number) ? DType::int8 : DType::uint8);
    return static_cast<DType>(first + std::countr_zero(size));
}

std::optional<DType> dtype_of(PyArrayObject* array) {
    return is_bfloat16(array) ? std::optional(DType::bfloat16)
                              : dtype_of(PyArray_TYPE(array), static_cast<std::size_t>(PyArray_ITEMSIZE(array)));
}

// An array over memory, which the owner keeps. Borrows the descriptor.
nb::object new_array_over(PyArray_Descr* descr, int num_axes, const npy_intp* shape, void* memory, nb::capsule owner) {
    Py_INCREF(descr);
    nb::object array = checked(
        PyArray_NewFromDescr(&PyArray_Type, descr, num_axes, shape, nullptr, memory, NPY_ARRAY_CARRAY, nullptr));
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.release().ptr()) != 0) {
        throw nb::python_error();
    }
    return array;
}

// A fresh array; its pages are warm if it is large. Borrows the descriptor.
nb::object new_array(PyArray_Descr* descr, int num_axes, const npy_intp* shape) {
    std::size_t nbytes = static_cast<std::size_t>(PyDataType_ELSIZE(descr));
    for (int axis = 0; axis < num_axes; ++axis) {
        nbytes *= static_cast<std::size_t>(shape[axis]);
    }
    if (nbytes >= smallest_warm) {
        void* const memory = take_warm(nbytes);
        return new_array_over(descr, num_axes, shape, memory, nb::capsule(memory, &release_warm));
    }
    Py_INCREF(descr);
    return checked(PyArray_NewFromDescr(&PyArray_Type, descr, num_axes, shape, nullptr, nullptr, 0, nullptr));
}

// The dtype bfloat16 of ml_dtypes; invalid where that is missing.
nb::object bfloat16_descr() {
    const nb::object module = nb::steal(PyImport_ImportModule("ml_dtypes"));
    const nb::object type = module.is_valid() ? nb::steal(PyObject_GetAttrString(module.ptr(), "bfloat16")) : module;
    PyArray_Descr* descr = nullptr;
    if (type.is_valid()) {
        PyArray_DescrConverter(type.ptr(), &descr);
    }
    PyErr_Clear();
    return nb::steal(reinterpret_cast<PyObject*>(descr));
}

// The descriptor of a dtype; invalid for bfloat16 where ml_dtypes is missing.
nb::object descr_of(DType dtype) {
    constexpr int numbers[num_array_dtypes] = {NPY_BOOL,   NPY_INT8,   NPY_INT16,  NPY_INT32, NPY_INT64,
                                         NPY_UINT8,  NPY_UINT16, NPY_UINT32, NPY_UINT64, NPY_HALF,
                                         NPY_NOTYPE, NPY_FLOAT,  NPY_DOUBLE, NPY_CFLOAT, NPY_CDOUBLE};
    const int number = numbers[static_cast<std::size_t>(dtype)];
    return number == NPY_NOTYPE ? bfloat16_descr()
                                : nb::steal(reinterpret_cast<PyObject*>(PyArray_DescrFromType(number)));
}

struct SharedBlock {
    std::shared_ptr<shm::Arena> arena;
    std::size_t offset;

    ~SharedBlock() { arena->free(offset); }
};

PyArray_Descr* as_descr(const nb::object& object) { return reinterpret_cast<PyArray_Descr*>(object.ptr()); }

// A flat array of bytes that deletes its owner in the end.
template <class Owner>
nb::object bytes_over(std::byte* memory, std::size_t nbytes, Owner* owner) {
    nb::capsule held(owner, [](void* it) noexcept { delete static_cast<Owner*>(it); });
    const auto length = static_cast<npy_intp>(nbytes);
    return new_array_over(as_descr(descr_of(DType::uint8)), 1, &length, memory, std::move(held));
}

}  // namespace

void load_numpy() {
    if (PyArray_ImportNumPyAPI() < 0) {
        throw nb::python_error();
    }
}

bool view_plain_array(PyObject* object, ArrayView& into, bool* is_writable) {
    if (!PyArray_CheckExact(object)) {
        return false;
    }
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    constexpr int needed = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    if ((PyArray_FLAGS(array) & needed) != needed || !PyArray_ISNOTSWAPPED(array)) {
        return false;
    }
    const auto dtype = dtype_of(array);
    if (!dtype) {
        return false;
    }
    into.data = static_cast<std::byte*>(PyArray_DATA(array));
    into.dtype = *dtype;
    into.num_axes = PyArray_NDIM(array);
    std::copy_n(PyArray_DIMS(array), into.num_axes, into.shape);
    into.nbytes = static_cast<std::size_t>(PyArray_SIZE(array)) * static_cast<std::size_t>(PyArray_ITEMSIZE(array));
    if (is_writable != nullptr) {
        *is_writable = (PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) != 0;
    }
    return true;
}

nb::object new_array_like(PyObject* like, int num_axes, const std::ptrdiff_t* shape) {
    return new_array(PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like)), num_axes, shape);
}

nb::object new_array_of(DType dtype, int num_axes, const std::ptrdiff_t* shape) {
    const nb::object descr = descr_of(dtype);
    return descr.is_valid() ? new_array(as_descr(descr), num_axes, shape) : nb::object();
}

nb::object array_over_memory(DType dtype, int num_axes, const std::ptrdiff_t* shape, std::byte* memory,
                             void (*release)(void*) noexcept) {
    const nb::object descr = descr_of(dtype);
    return descr.is_valid() ? new_array_over(as_descr(descr), num_axes, shape, memory, nb::capsule(memory, release))
                            : nb::object();
}

nb::object array_over_buffer(PyObject* exporter) {
    const nb::object view = nb::steal(PyMemoryView_FromObject(exporter));
    nb::object array =
        view.is_valid() ? nb::steal(PyArray_FromAny(view.ptr(), nullptr, 0, 0, 0, nullptr)) : nb::object();
    PyErr_Clear();
    return array;
}

nb::object array_of_scalar(PyObject* scalar) {
    nb::object array = nb::steal(PyArray_FromScalar(scalar, nullptr));
    PyErr_Clear();
    return array;
}

bool is_numpy_scalar(PyObject* object) { return PyArray_CheckScalar(object) && !PyArray_Check(object); }

nb::object scalar_of(PyObject* array) { return nb::steal(PyArray_Return(reinterpret_cast<PyArrayObject*>(Py_NewRef(array)))); }

nb::object packed_copy(PyObject* object, const std::byte*& begin, const std::byte*& end) {
    if (!PyArray_CheckExact(object)) {
        return {};
    }
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (!dtype_of(array) || !PyArray_ISNOTSWAPPED(array)) {
        return {};
    }
    begin = end = static_cast<const std::byte*>(PyArray_DATA(array));
    for (int axis = 0; axis < PyArray_NDIM(array); ++axis) {
        const npy_intp reach = PyArray_STRIDE(array, axis) * std::max<npy_intp>(PyArray_DIM(array, axis) - 1, 0);
        (reach < 0 ? begin : end) += reach;
    }
    end += PyArray_ITEMSIZE(array);
    nb::object copy = nb::steal(PyArray_NewCopy(array, NPY_CORDER));
    if (!copy.is_valid()) {
        PyErr_Clear();  // NumPy's own MemoryError: nothing else can go wrong with a plain dtype
        throw core::OutOfMemory(static_cast<std::size_t>(PyArray_NBYTES(array)));
    }
    return copy;
}

nb::object new_shared_array(const std::shared_ptr<shm::Arena>& arena, std::size_t nbytes) {
    auto* block = new SharedBlock{arena, arena->allocate(nbytes)};
    return bytes_over(arena->base() + block->offset, nbytes, block);
}

nb::object array_over_block(std::unique_ptr<shm::CommonBlock> block, std::size_t nbytes) {
    std::byte* const data = block->data();
    return bytes_over(data, nbytes, block.release());
}

}  // namespace ferrodist::bind
