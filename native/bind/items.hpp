// SPDX-License-Identifier: MIT OR Apache-2.0
// The items of a Python sequence.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace ferrodist::bind {

// Reads lists and tuples in place, several times as quick as an iterator; copies other sequences.
class Items {
public:
    explicit Items(const nanobind::sequence& sequence)
        : items_(nanobind::steal(PySequence_Fast(sequence.ptr(), "expected a sequence"))) {
        if (!items_.is_valid()) {
            throw nanobind::python_error();
        }
    }

    PyObject** begin() const { return PySequence_Fast_ITEMS(items_.ptr()); }
    PyObject** end() const { return begin() + size(); }
    std::size_t size() const {
        return static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items_.ptr()));
    }

private:
    nanobind::object items_;
};

}  // namespace ferrodist::bind
