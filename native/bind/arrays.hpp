// SPDX-License-Identifier: MIT OR Apache-2.0
// NumPy arrays seen through NumPy's own C interface: an order of magnitude quicker than buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "reduce/reduce.hpp"
#include "shm/arena.hpp"
#include "shm/common_block.hpp"

namespace ferrodist::bind {

// The most axes an array can have.
constexpr int max_axes = 64;

// A plain, contiguous array of a dtype we know: nothing about it needs a second look.
struct PlainArray {
    std::byte* data;
    DType dtype;
    int num_axes;
    const std::ptrdiff_t* shape;
    std::size_t nbytes;
    bool is_writable;
};

// Loads NumPy's table of functions; throws if it cannot.
void load_numpy();

// Only numpy.ndarray itself, C-contiguous, aligned, in the machine's byte order.
std::optional<PlainArray> try_plain_array(PyObject* object);

// A fresh array of the dtype of `like`, whose pages are warm if it is large. New reference.
PyObject* new_array_like(PyObject* like, int num_axes, const std::ptrdiff_t* shape);

// The same for a dtype; invalid for bfloat16 where ml_dtypes is missing.
nanobind::object new_array_of(DType dtype, int num_axes, const std::ptrdiff_t* shape);

// An array over memory that it releases in the end; invalid as above, and then the memory is the caller's.
nanobind::object array_over_memory(DType dtype, int num_axes, const std::ptrdiff_t* shape, std::byte* memory,
                                   void (*release)(void*) noexcept);

// An array over what exports a buffer, or of a NumPy scalar; invalid, with no exception set, if NumPy cannot
// make one.
nanobind::object array_over_buffer(PyObject* exporter);
nanobind::object array_of_scalar(PyObject* scalar);
bool is_numpy_scalar(PyObject* object);
// The scalar that a 0-d array holds.
nanobind::object scalar_of(PyObject* array);

// A plain array that try_plain_array refuses for its strides or alignment, as a packed copy; invalid for any
// other object. `begin` and `end` are where the caller's own memory lies.
nanobind::object packed_copy(PyObject* object, const std::byte*& begin, const std::byte*& end);

// A flat array of bytes in an arena. The block is freed with the last view of it.
nanobind::object new_shared_array(const std::shared_ptr<shm::Arena>& arena, std::size_t nbytes);

// A flat array of bytes over a block that other ranks index, too; it is dropped with the last view of it.
nanobind::object array_over_block(std::unique_ptr<shm::CommonBlock> block, std::size_t nbytes);

}  // namespace ferrodist::bind
