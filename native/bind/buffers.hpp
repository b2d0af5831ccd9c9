// SPDX-License-Identifier: MIT OR Apache-2.0
// Views of Python objects as flat bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace ferrodist::bind {

// The bytes of a C-contiguous object with the buffer protocol; holds on to it while it lives.
class View {
public:
    View(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw nanobind::python_error();
        }
    }
    View(View&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    ~View() { PyBuffer_Release(&view_); }  // does nothing where obj is null

    void* data() const { return view_.buf; }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_;
};

inline View readable(nanobind::handle object) { return View(object, PyBUF_SIMPLE); }
inline View writable(nanobind::handle object) { return View(object, PyBUF_WRITABLE); }

}  // namespace ferrodist::bind
