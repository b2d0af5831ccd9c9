// SPDX-License-Identifier: MIT OR Apache-2.0
// What Python is told of a call that may have waited.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "bind/gil_watch.hpp"
#include "shm/wait.hpp"

namespace ferrodist::bind {

using Answer = std::tuple<int, int, nanobind::object>;  // outcome, culprit, the error that ended a wait

inline Answer answer(const shm::Ending& ending, const GilWatch& watch) {
    nanobind::object error = watch.error().is_valid() ? watch.error() : nanobind::none();
    return {static_cast<int>(ending.outcome), ending.culprit, error};
}

inline std::int64_t to_ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// A deadline of Python's time.monotonic(); what int64 cannot count in nanoseconds is none.
inline std::int64_t deadline_ns(double deadline) {
    return deadline > 9e9 ? 0 : std::max<std::int64_t>(to_ns(deadline), 1);
}

}  // namespace ferrodist::bind
