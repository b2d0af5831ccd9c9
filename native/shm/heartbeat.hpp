// SPDX-License-Identifier: MIT OR Apache-2.0
// The heartbeat: one native thread per process shows the others that it is alive.
#pragma once

#include <atomic>
#include <cstdint>

namespace ferrodist::shm {

using Beat = std::atomic<std::uint64_t>;

// Begins to count `beat` up every so often; the thread starts with the first and ends with the last.
void start_beating(Beat& beat, std::int64_t interval_ns);
void stop_beating(Beat& beat);

}  // namespace ferrodist::shm
