// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/turn.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

bool tell(PyObject* backend, const char* method) {
    PyObject* const nothing = PyObject_CallMethod(backend, method, nullptr);
    Py_XDECREF(nothing);
    return nothing != nullptr;
}

}  // namespace

PyObject* Turn::end(PyObject* result) {
    turns_.end(number_);
    const bool is_told = (!watch_.has_looked() || tell(args_[0], "_stop_looking")) &&
                         (turns_.is_idle() || tell(args_[0], "_wake_turns"));
    return is_told ? Py_NewRef(result) : nullptr;
}

PyObject* Turn::fail() {
    const nb::object error = watch_.error().is_valid() ? watch_.error() : nb::none();
    return PyObject_CallMethod(args_[0], "_fail_at_once", "iiKOOOOOi", static_cast<int>(ending_.outcome),
                               ending_.culprit, static_cast<unsigned long long>(number_), error.ptr(), args_[1],
                               args_[2], args_[4], args_[5], num_runs_);
}

PyObject* Turn::fail_with_error() {
    watch_.keep_error();
    ending_ = {shm::Outcome::interrupted};
    return fail();
}

}  // namespace ferrodist::bind
