// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/arrays.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstring>

#include "core/memory.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

std::optional<DType> integer_of(char kind, std::size_t size) {
    const int step = size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : -1;
    const auto first = static_cast<int>(kind == 'i' ? DType::int8 : DType::uint8);
    return step < 0 ? std::nullopt : std::optional(static_cast<DType>(first + step));
}

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
    if (PyTypeNum_ISSIGNED(number)) {
        return integer_of('i', size);
    }
    return PyTypeNum_ISUNSIGNED(number) ? integer_of('u', size) : std::nullopt;
}

std::optional<DType> dtype_of(PyArrayObject* array) {
    return is_bfloat16(array) ? std::optional(DType::bfloat16)
                              : dtype_of(PyArray_TYPE(array), static_cast<std::size_t>(PyArray_ITEMSIZE(array)));
}

PyObject* as_base(PyObject* array, PyObject* capsule) {
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), capsule) != 0) {
        Py_DECREF(array);
        throw nb::python_error();
    }
    return array;
}

// Borrows the descriptor.
PyObject* new_array_over(PyArray_Descr* descr, int num_axes, const npy_intp* shape, void* memory,
                         void (*release)(void*) noexcept) {
    nb::capsule owner(memory, release);
    Py_INCREF(descr);
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, num_axes, shape, nullptr, memory,
                                           NPY_ARRAY_CARRAY, nullptr);
    if (array == nullptr) {
        throw nb::python_error();
    }
    return as_base(array, owner.release().ptr());
}

// A fresh array; its pages are warm if it is large. Borrows the descriptor.
PyObject* new_array(PyArray_Descr* descr, int num_axes, const npy_intp* shape) {
    std::size_t nbytes = static_cast<std::size_t>(PyDataType_ELSIZE(descr));
    for (int axis = 0; axis < num_axes; ++axis) {
        nbytes *= static_cast<std::size_t>(shape[axis]);
    }
    if (nbytes >= smallest_warm) {
        return new_array_over(descr, num_axes, shape, take_warm(nbytes),
                              [](void* block) noexcept { release_warm(block); });
    }
    Py_INCREF(descr);
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, num_axes, shape, nullptr, nullptr, 0, nullptr);
    if (array == nullptr) {
        throw nb::python_error();
    }
    return array;
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

// A flat array of bytes that deletes its owner in the end.
template <class Owner>
nb::object bytes_over(std::byte* memory, std::size_t nbytes, Owner* owner) {
    nb::capsule held(owner, [](void* it) noexcept { delete static_cast<Owner*>(it); });
    npy_intp length = static_cast<npy_intp>(nbytes);
    PyObject* array = PyArray_SimpleNewFromData(1, &length, NPY_UINT8, memory);
    if (array == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(as_base(array, held.release().ptr()));
}

}  // namespace

void load_numpy() {
    if (PyArray_ImportNumPyAPI() < 0) {
        throw nb::python_error();
    }
}

std::optional<PlainArray> try_plain_array(PyObject* object) {
    if (!PyArray_CheckExact(object)) {
        return std::nullopt;
    }
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    constexpr int needed = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    if ((PyArray_FLAGS(array) & needed) != needed || !PyArray_ISNOTSWAPPED(array)) {
        return std::nullopt;
    }
    const auto size = static_cast<std::size_t>(PyArray_ITEMSIZE(array));
    const auto dtype = dtype_of(array);
    if (!dtype) {
        return std::nullopt;
    }
    return PlainArray{static_cast<std::byte*>(PyArray_DATA(array)),
                      *dtype,
                      PyArray_NDIM(array),
                      PyArray_DIMS(array),
                      static_cast<std::size_t>(PyArray_SIZE(array)) * size,
                      (PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) != 0};
}

PyObject* new_array_like(PyObject* like, int num_axes, const std::ptrdiff_t* shape) {
    return new_array(PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like)), num_axes, shape);
}

nb::object new_array_of(DType dtype, int num_axes, const std::ptrdiff_t* shape) {
    const nb::object descr = descr_of(dtype);
    if (!descr.is_valid()) {
        return {};
    }
    return nb::steal(new_array(reinterpret_cast<PyArray_Descr*>(descr.ptr()), num_axes, shape));
}

nb::object array_over_memory(DType dtype, int num_axes, const std::ptrdiff_t* shape, std::byte* memory,
                             void (*release)(void*) noexcept) {
    const nb::object descr = descr_of(dtype);
    if (!descr.is_valid()) {
        return {};
    }
    return nb::steal(new_array_over(reinterpret_cast<PyArray_Descr*>(descr.ptr()), num_axes, shape, memory, release));
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
    return nb::steal(PyArray_NewCopy(array, NPY_CORDER));
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
