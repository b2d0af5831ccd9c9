// SPDX-License-Identifier: MIT OR Apache-2.0
// The fast path of a collective: one native function from the caller's array to the result, for every kind of
// array and of group.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <new>

#include "bind/collective_call.hpp"
#include "bind/gil_hook.hpp"
#include "bind/hooks.hpp"
#include "bind/hybrid_group.hpp"
#include "bind/progress.hpp"
#include "bind/shared_group.hpp"
#include "bind/tcp_group.hpp"
#include "bind/tickets.hpp"
#include "core/wait.hpp"

namespace ferrodist::bind {

// A built-in function bound to a group: (backend, kind, x, out, op, root) -> the result, or NotImplemented for
// what takes the general path.
template <class Group>
nanobind::object bind_call_path(nanobind::handle group);

// The same for a call in flight: (backend, kind, x, out, op, root) -> a Work.
template <class Group>
nanobind::object bind_start_path(nanobind::handle group);

// Whether calls may be made from this thread of this process, as far as native code knows.
bool can_call(const SharedGroup& group);
bool can_call(const TcpGroup& group);
bool can_call(const HybridGroup& group);

// Sets a MemoryError that says the size: of the array there was no memory for, or of those the call is about.
void set_memory_error(const std::bad_alloc& error, std::size_t nbytes = 0);

using FastFunction = PyObject* (*)(PyObject* self, PyObject* const* args, Py_ssize_t num_args);

// Nothing may leave a C function as a C++ exception; no other number of arguments gets in.
template <FastFunction call, Py_ssize_t num_expected>
PyObject* call_safely(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
    try {
        if (num_args == num_expected) {
            return call(self, args, num_args);
        }
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    } catch (nanobind::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc& error) {
        set_memory_error(error);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

template <FastFunction call, Py_ssize_t num_expected>
PyCFunction as_function() {
    const FastFunction safe = &call_safely<call, num_expected>;
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(safe));
}

}  // namespace ferrodist::bind
