// SPDX-License-Identifier: MIT OR Apache-2.0
// The short way of a call: plain NumPy arrays, one native function from check to result.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <new>

#include "bind/plain_call.hpp"
#include "bind/shared_group.hpp"
#include "bind/turn.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::bind {

// A built-in function bound to a SharedGroup: (backend, kind, x, out, op, root) -> the result, or
// NotImplemented for whatever needs the general way.
nanobind::object bind_at_once(nanobind::handle shared_group);
// The same for messages: (backend, x, dst, tag) -> None, and (backend, like, src, out, tag) -> array.
nanobind::object bind_send_at_once(nanobind::handle shared_group);
nanobind::object bind_recv_at_once(nanobind::handle shared_group);

// Whether calls may be made from this thread of this process, as far as native code knows.
bool can_go_at_once(const SharedGroup& group);

// A call that goes the short way: its turn, and each of its collectives; false if one failed.
Turn begin_turn(SharedGroup& group, PyObject* const* args);
bool run_task(Turn& turn, SharedGroup& group, const shm::Task& task);

// The short way of a scatter, with the same arguments. Where a rank's array turns out not to fit its
// part, gives the number of the turn and what the root has told: Python goes on from there.
PyObject* scatter_at_once(SharedGroup& group, PyObject* const* args);

using AtOnce = PyObject* (*)(PyObject* self, PyObject* const* args, Py_ssize_t num_args);

// Nothing may leave a C function as a C++ exception; no other number of arguments gets in.
template <AtOnce call, Py_ssize_t num_expected>
PyObject* call_safely(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
    try {
        if (num_args == num_expected) {
            return call(self, args, num_args);
        }
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    } catch (nanobind::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

template <AtOnce call, Py_ssize_t num_expected>
PyCFunction as_function() {
    const AtOnce safe = &call_safely<call, num_expected>;
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(safe));
}

}  // namespace ferrodist::bind
