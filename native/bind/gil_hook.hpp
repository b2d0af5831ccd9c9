// SPDX-License-Identifier: MIT OR Apache-2.0
// A wait that lets go of the GIL, and takes it back now and then to hear of signals.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/gil.hpp"
#include "bind/progress.hpp"
#include "core/process.hpp"
#include "core/wait.hpp"

namespace ferrodist::bind {

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

class GilHook : public core::ProgressHook {
public:
    // Only hears of signals.
    GilHook() = default;
    // Calls `poll` now and then. Beside a thread that computes it does so more rarely: the GIL may be hard
    // to get, and signals come elsewhere.
    explicit GilHook(PyObject* poll, bool in_background = false) : poll_(poll), in_background_(in_background) {}
    // Calls a hook, with the backend and where the call was made; None if that is where this thread is.
    GilHook(PyObject* hook, PyObject* backend, PyObject* site) : poll_(hook), backend_(backend), site_(site) {}
    ~GilHook() override { take_back(); }
    GilHook(const GilHook&) = delete;
    GilHook& operator=(const GilHook&) = delete;

    void let_go() override {
        if (saved_ == nullptr) {
            saved_ = PyEval_SaveThread();
        }
    }

    void take_back() {
        if (saved_ == nullptr) {
            return;
        }
        in_python([this] { PyEval_RestoreThread(saved_); });
        saved_ = nullptr;
    }

    bool poll() override {
        held_.note();
        if (Progress::is_stopping_here()) {
            return false;
        }
        if (in_background_ && ++num_polls_ % polls_in_background != 0) {
            return true;
        }
        has_polled_ = true;
        take_back();
        const bool goes_on = in_python(PyErr_CheckSignals) == 0 && ask();
        if (!goes_on) {
            keep_error();
        }
        let_go();
        return goes_on;
    }

    void progressed() override { held_.let_go(); }

    // Takes the exception that is set.
    void keep_error() { error_ = nanobind::steal(fetch_exception()); }
    bool has_polled() const { return has_polled_; }

    // The exception that ended the wait; invalid if there was none.
    nanobind::object error() const { return error_; }

protected:
    // Calls what it was given; false with an exception set.
    virtual bool ask() {
        if (poll_ == nullptr) {
            return true;
        }
        PyObject* answer = backend_ != nullptr ? call_python(poll_, backend_, site_) : call_python(poll_);
        Py_XDECREF(answer);
        return answer != nullptr;
    }

private:
    static constexpr int polls_in_background = 10;

    PyObject *poll_ = nullptr, *backend_ = nullptr, *site_ = nullptr;
    bool in_background_ = false, has_polled_ = false;
    int num_polls_ = 0;
    PyThreadState* saved_ = nullptr;
    core::HeldThread held_;
    nanobind::object error_;
};

}  // namespace ferrodist::bind
