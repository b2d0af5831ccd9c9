// SPDX-License-Identifier: MIT OR Apache-2.0
// Waits of Python: they let go of the GIL, take it back now and then to hear of signals, and tell how they ended.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "bind/python.hpp"
#include "core/process.hpp"
#include "core/wait.hpp"

namespace ferrodist::bind {

class GilHook : public core::ProgressHook, core::NonCopyable {
public:
    // Only hears of signals.
    GilHook() = default;
    // Calls `poll` now and then. Beside a thread that computes it does so more rarely: the GIL may be hard
    // to get, and signals come elsewhere.
    explicit GilHook(PyObject* poll, bool in_background = false) : poll_(poll), in_background_(in_background) {}
    // Calls a hook, with the backend and where the call was made; None if that is where this thread is.
    GilHook(PyObject* hook, PyObject* backend, PyObject* site) : poll_(hook), backend_(backend), site_(site) {}
    ~GilHook() override { take_back(); }

    void let_go() override {
        if (saved_ == nullptr) {
            saved_ = PyEval_SaveThread();
        }
    }

    void take_back() {
        if (saved_ != nullptr) {
            in_python([this] { PyEval_RestoreThread(saved_); });
            saved_ = nullptr;
        }
    }

    bool poll() override;
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
    PyObject *poll_ = nullptr, *backend_ = nullptr, *site_ = nullptr;
    bool in_background_ = false, has_polled_ = false;
    int num_polls_ = 0;
    PyThreadState* saved_ = nullptr;
    core::HeldThread held_;
    nanobind::object error_;
};

// A Status, with the exception that ended a wait or None. Python's ferrodist._native.Status.
struct CallStatus {
    explicit CallStatus(int code, int failed_rank = -1, nanobind::object error = nanobind::none())
        : code(code), failed_rank(failed_rank), error(std::move(error)) {}
    explicit CallStatus(const core::Status& status) : CallStatus(static_cast<int>(status.code), status.failed_rank) {}

    int code, failed_rank;
    nanobind::object error;
};

inline std::int64_t to_ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// How far a call waits beyond its timeout, both in seconds: not at all if the late timeout is no longer.
inline core::Patience patience_of(double timeout, double late_timeout) {
    return late_timeout > timeout ? core::Patience{to_ns(std::min(late_timeout, 9e9) - timeout), to_ns(timeout)}
                                  : core::Patience{};
}

// A ferrodist.deadline.Deadline, on the clock of time.monotonic().
struct Deadline {
    explicit Deadline(nanobind::handle deadline)
        : seconds(seconds_of(deadline.attr("seconds"))),
          patience(patience_of(seconds, nanobind::cast<double>(deadline.attr("late_seconds")))) {
        // What int64 cannot count in nanoseconds is no deadline.
        const double end = nanobind::cast<double>(deadline.attr("end"));
        at_ns = end > 9e9 ? 0 : std::max<std::int64_t>(to_ns(end), 1);
    }

    std::int64_t at_ns = 0;
    double seconds;
    core::Patience patience;

private:
    static double seconds_of(const nanobind::object& seconds) {
        return seconds.is_none() ? std::numeric_limits<double>::infinity() : nanobind::cast<double>(seconds);
    }
};

// What a wait that Python begins is given by it.
struct WaitArguments {
    nanobind::handle deadline;
    bool in_background;
    nanobind::handle poll;  // or None
};

// Waits without the GIL: `wait(options)` gives a status. Nobody spins in the background.
template <class Wait>
CallStatus wait_without_gil(const WaitArguments& args, core::Spins* spins, std::uint64_t sequence, const Wait& wait) {
    GilHook hook(args.poll.is_none() ? nullptr : args.poll.ptr(), args.in_background);
    const Deadline limit(args.deadline);
    const core::WaitOptions options{&hook, limit.at_ns, args.in_background ? core::no_spins : spins, sequence, 0,
                                    limit.patience};
    hook.let_go();
    const core::Status status = wait(options);
    hook.take_back();
    CallStatus told(status);
    if (hook.error().is_valid()) {
        told.error = hook.error();
    }
    return told;
}

}  // namespace ferrodist::bind
