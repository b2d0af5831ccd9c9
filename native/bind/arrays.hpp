// SPDX-License-Identifier: MIT OR Apache-2.0
// NumPy arrays seen through NumPy's own C interface: an order of magnitude quicker than buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "reduce/reduce.hpp"
#include "shm/arena.hpp"
#include "shm/common_block.hpp"

namespace ferrodist::bind {

// The most axes an array can have.
constexpr int max_axes = 64;

// C-contiguous memory of one array.
struct ArrayView {
    std::byte* data = nullptr;
    DType dtype = DType::uint8;
    int num_axes = 0;
    std::ptrdiff_t shape[max_axes];
    std::size_t nbytes = 0;

    bool has_shape(int axes, const std::ptrdiff_t* lengths) const {
        return num_axes == axes && std::equal(lengths, lengths + axes, shape);
    }
};

// Loads NumPy's table of functions; throws if it cannot.
void load_numpy();

// Views an array, and tells whether it may be written to. Only numpy.ndarray itself, C-contiguous, aligned, in the
// machine's byte order, of a dtype we know: nothing about it needs a second look. False for all else.
bool view_plain_array(PyObject* object, ArrayView& into, bool* is_writable = nullptr);

// A fresh array of the dtype of `like`, whose pages are warm if it is large.
nanobind::object new_array_like(PyObject* like, int num_axes, const std::ptrdiff_t* shape);

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

// A plain array that view_plain_array refuses for its strides or alignment, as a packed copy; invalid for any
// other object. `begin` and `end` are where the caller's own memory lies.
nanobind::object packed_copy(PyObject* object, const std::byte*& begin, const std::byte*& end);

// A flat array of bytes in an arena. The block is freed with the last view of it.
nanobind::object new_shared_array(const std::shared_ptr<shm::Arena>& arena, std::size_t nbytes);

// A flat array of bytes over a block that other ranks index, too; it is dropped with the last view of it.
nanobind::object array_over_block(std::unique_ptr<shm::CommonBlock> block, std::size_t nbytes);

}  // namespace ferrodist::bind
