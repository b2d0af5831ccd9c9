// SPDX-License-Identifier: MIT OR Apache-2.0
// Python's C API as this folder uses it: the GIL, calls, functions, sequences and buffers.
//
// Up to Python 3.13 a thread that asks for the GIL during finalization is ended by pthread_exit, which unwinds
// its stack: destructors would run without the GIL, and the first function that must not throw would abort the
// process. Python 3.14 stops such a thread where it is, and so does everything here.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <new>
#include <span>
#include <system_error>
#include <utility>

#include "core/noncopyable.hpp"

namespace ferrodist::bind {

// -- the GIL -------------------------------------------------------------------------------------

[[noreturn]] inline void stop_thread() {
    for (;;) {
        ::pause();
    }
}

// Makes calls of the C API that may run Python code, or wait for the GIL.
template <class Call>
auto in_python(const Call& call) {
    try {
        return call();
    } catch (...) {  // the C API throws nothing: this is pthread_exit
        stop_thread();
    }
}

// Releases the GIL for a scope.
class WithoutGil : core::NonCopyable {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        in_python([this] { PyEval_RestoreThread(state_); });
    }

private:
    PyThreadState* state_;
};

// Does something without the GIL.
template <class Call>
auto without_gil(const Call& call) {
    const WithoutGil unlocked;
    return call();
}

// Holds the GIL for a scope, on a thread that Python need not know.
class WithGil : core::NonCopyable {
public:
    WithGil() : state_(in_python([] { return PyGILState_Ensure(); })) {}
    ~WithGil() { PyGILState_Release(state_); }

private:
    PyGILState_STATE state_;
};

// -- calls of Python -----------------------------------------------------------------------------

// A new reference; throws what is set if there is none.
inline nanobind::object checked(PyObject* made) {
    return made != nullptr ? nanobind::steal(made) : throw nanobind::python_error();
}

// Calls a Python object; a new reference, or null with an exception set.
template <class... Arguments>
PyObject* call_python(PyObject* callable, Arguments... arguments) {
    return in_python([&] { return PyObject_CallFunctionObjArgs(callable, arguments..., nullptr); });
}

// The same with arguments made from a format of Py_BuildValue, of two or more.
template <class... Arguments>
PyObject* try_python_with(PyObject* callable, const char* format, Arguments... arguments) {
    return in_python([&] { return PyObject_CallFunction(callable, format, arguments...); });
}
template <class... Arguments>
nanobind::object call_python_with(PyObject* callable, const char* format, Arguments... arguments) {
    return checked(try_python_with(callable, format, arguments...));
}

// The exception that is set, as an object with its traceback; a new reference. None is set then.
inline PyObject* fetch_exception() {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) {
        PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
}

// Calls a method with one or more arguments; a new reference, or null with an exception set.
template <class... Arguments>
PyObject* call_method(PyObject* name, Arguments... arguments) {
    PyObject* const all[] = {arguments...};
    return in_python([&] { return PyObject_VectorcallMethod(name, all, sizeof...(arguments), nullptr); });
}

// Raises an exception; null, as functions return then.
inline PyObject* raise(PyObject* error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    return nullptr;
}

[[noreturn]] inline nanobind::object throw_error(nanobind::handle error) {
    raise(error.ptr());
    throw nanobind::python_error();
}

// The exception that something ended with; invalid if there was none.
template <class Call>
nanobind::object caught(const Call& call) {
    try {
        call();
        return {};
    } catch (nanobind::python_error& error) {
        error.restore();
        return nanobind::steal(fetch_exception());
    }
}

// Has Python do what must be done, whatever happens: `step(error or None)` gives a new reference, or null with an
// exception set. A signal handler may raise at any instruction of Python code, also in `except` and `finally`; then the
// step is begun again, with the new error. Gives the last error, which has the one before as its context.
template <class Step>
nanobind::object insist(nanobind::object error, const Step& step) {
    constexpr int most_tries = 100;  // a step that always fails has another reason
    for (int i = 0; i < most_tries; ++i) {
        const nanobind::object done = nanobind::steal(step(error.is_valid() ? error.ptr() : Py_None));
        if (done.is_valid()) {
            break;
        }
        const nanobind::object later = nanobind::steal(fetch_exception());
        if (error.is_valid() && !later.is(error)) {
            PyException_SetContext(later.ptr(), nanobind::object(error).release().ptr());
        }
        error = later;
    }
    return error;
}

// -- functions that Python calls -----------------------------------------------------------------

// Sets an OutOfMemory that says the size: of the array there was no memory for, or of those the call is about.
void set_memory_error(const std::bad_alloc& error, std::size_t nbytes = 0);

// Throws the error of a thread that cannot be started.
[[noreturn]] void raise_no_thread(const std::system_error& error);

// Starts a thread that a call in flight needs.
template <class Start>
void start_or_raise(const Start& start) {
    try {
        start();
    } catch (const std::system_error& error) {
        raise_no_thread(error);
    }
}

// Nothing may leave a C function as a C++ exception.
template <class Call>
PyObject* safely(const Call& call) {
    try {
        return call();
    } catch (nanobind::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc& error) {
        set_memory_error(error);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

using FastFunction = PyObject* (*)(PyObject* self, PyObject* const* args);

// A function for METH_FASTCALL; no other number of arguments gets in.
template <FastFunction call, Py_ssize_t num_expected>
PyCFunction as_function() {
    PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) =
        [](PyObject* self, PyObject* const* args, Py_ssize_t num_args) -> PyObject* {
        if (num_args != num_expected) {
            PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
            return nullptr;
        }
        return safely([&] { return call(self, args); });
    };
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// What a fast path returns for what takes the general path.
inline PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

inline void require(bool is_right, const char* problem) {
    if (!is_right) {
        throw nanobind::value_error(problem);
    }
}

// -- sequences and buffers -----------------------------------------------------------------------

// The items of a sequence. Reads lists and tuples in place, several times as quick as an iterator; copies others.
class Items {
public:
    explicit Items(nanobind::handle sequence) : items_(checked(PySequence_Fast(sequence.ptr(), "expected a sequence"))) {}

    PyObject** begin() const { return PySequence_Fast_ITEMS(items_.ptr()); }
    PyObject** end() const { return begin() + size(); }
    std::size_t size() const { return static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items_.ptr())); }

private:
    nanobind::object items_;
};

inline nanobind::object tuple_of(int num_axes, const std::ptrdiff_t* shape) {
    nanobind::object tuple = checked(PyTuple_New(num_axes));
    for (int axis = 0; axis < num_axes; ++axis) {
        PyTuple_SET_ITEM(tuple.ptr(), axis, PyLong_FromSsize_t(shape[axis]));
    }
    return tuple;
}

using Bytes = std::span<const std::byte>;

inline Bytes bytes_of(const nanobind::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

// The bytes of a C-contiguous object with the buffer protocol, or none; holds on to it while it lives.
class View {
public:
    View() = default;
    View(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw nanobind::python_error();
        }
    }
    View(View&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    View& operator=(View&& other) noexcept {
        std::swap(view_, other.view_);
        return *this;
    }
    ~View() { PyBuffer_Release(&view_); }  // does nothing where obj is null

    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }
    Bytes bytes() const { return {data(), nbytes()}; }

private:
    Py_buffer view_{};
};

inline View readable(nanobind::handle object) { return View(object, PyBUF_SIMPLE); }
inline View writable(nanobind::handle object) { return View(object, PyBUF_WRITABLE); }
// The same of what may be None.
inline View readable_if(nanobind::handle object) { return object.is_none() ? View() : readable(object); }
inline View writable_if(nanobind::handle object) { return object.is_none() ? View() : writable(object); }

}  // namespace ferrodist::bind
