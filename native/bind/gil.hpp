// SPDX-License-Identifier: MIT OR Apache-2.0
// Holding the GIL and releasing it, also while the interpreter ends.
//
// Up to Python 3.13 a thread that asks for the GIL during finalization is ended by pthread_exit, which unwinds
// its stack: destructors would run without the GIL, and the first function that must not throw would abort the
// process. Python 3.14 stops such a thread where it is, and so does everything here.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace ferrodist::bind {

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
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        in_python([this] { PyEval_RestoreThread(state_); });
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};

// Holds the GIL for a scope, on a thread that Python need not know.
class WithGil {
public:
    WithGil() : state_(in_python([] { return PyGILState_Ensure(); })) {}
    ~WithGil() { PyGILState_Release(state_); }
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;

private:
    PyGILState_STATE state_;
};

// Calls a Python object; a new reference, or null with an exception set.
template <class... Arguments>
PyObject* call_python(PyObject* callable, Arguments... arguments) {
    return in_python([&] { return PyObject_CallFunctionObjArgs(callable, arguments..., nullptr); });
}

// The same with arguments made from a format of Py_BuildValue, of two or more.
template <class... Arguments>
PyObject* call_python_with(PyObject* callable, const char* format, Arguments... arguments) {
    return in_python([&] { return PyObject_CallFunction(callable, format, arguments...); });
}

}  // namespace ferrodist::bind
