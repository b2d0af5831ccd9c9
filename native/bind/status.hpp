// SPDX-License-Identifier: MIT OR Apache-2.0
// What Python is told of a call that may have waited.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "bind/gil_hook.hpp"
#include "core/wait.hpp"

namespace ferrodist::bind {

// A Status, with the exception that ended a wait or None. Python's ferrodist._native.Status.
struct CallStatus {
    explicit CallStatus(int code, int failed_rank = -1, nanobind::object error = nanobind::none())
        : code(code), failed_rank(failed_rank), error(std::move(error)) {}
    explicit CallStatus(const core::Status& status) : CallStatus(static_cast<int>(status.code), status.failed_rank) {}
    CallStatus(const core::Status& status, const GilHook& hook) : CallStatus(status) {
        if (hook.error().is_valid()) {
            error = hook.error();
        }
    }

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

}  // namespace ferrodist::bind
