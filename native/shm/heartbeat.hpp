// SPDX-License-Identifier: MIT OR Apache-2.0
// The heartbeat: one native thread per process shows the others that it is alive.
#pragma once

#include <atomic>
#include <cstdint>

namespace ferrodist::shm {

// What a process shows of itself. Written by its heartbeat only.
struct Beat {
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::int64_t> held_ns{0};  // how long a thread has been held in one call: see HeldThread
};

// Begins to beat every so often; the thread starts with the first and ends with the last.
void start_beating(Beat& beat, std::int64_t interval_ns);
void stop_beating(Beat& beat);

}  // namespace ferrodist::shm
