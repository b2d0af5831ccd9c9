// SPDX-License-Identifier: MIT OR Apache-2.0
// What Python is told of a call that may have waited.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
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

// A deadline of Python's time.monotonic(); what int64 cannot count in nanoseconds is none.
inline std::int64_t deadline_ns(double deadline) {
    return deadline > 9e9 ? 0 : std::max<std::int64_t>(to_ns(deadline), 1);
}

}  // namespace ferrodist::bind
