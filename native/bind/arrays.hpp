// SPDX-License-Identifier: MIT OR Apache-2.0
// NumPy arrays seen through NumPy's own C interface: an order of magnitude quicker than buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "fold/fold.hpp"
#include "shm/arena.hpp"

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

// The same for a dtype; invalid for bfloat16, which NumPy does not know by itself.
nanobind::object new_array_of(DType dtype, int num_axes, const std::ptrdiff_t* shape);

// A flat array of bytes in an arena. The block is freed with the last view of it.
nanobind::object new_shared_array(const std::shared_ptr<shm::Arena>& arena, std::size_t nbytes);

}  // namespace ferrodist::bind
