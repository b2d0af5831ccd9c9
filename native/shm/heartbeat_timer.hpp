// SPDX-License-Identifier: MIT OR Apache-2.0
// How long another process has shown no heartbeat.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/wait.hpp"
#include "shm/world.hpp"

namespace ferrodist::shm {

using namespace core;

class HeartbeatTimer {
public:
    // Tells whether a process has been silent for longer than `limit_ns`; `passed_ns` is the time
    // since the last look. Counts only time in which this process was awake itself: a whole job
    // may be stopped.
    bool is_too_long(const Peer& peer, std::int64_t limit_ns, std::int64_t passed_ns) {
        // Pairs with the heartbeat's fetch_add; orders nothing.
        const std::uint64_t beat = peer.header().beat.count.load(std::memory_order_relaxed);
        quiet_ns_ = beat == beat_ ? quiet_ns_ + std::min(passed_ns, 2 * longest_sleep_ns) : 0;
        beat_ = beat;
        return quiet_ns_ > limit_ns && peer.hook >= 0;
    }

private:
    std::uint64_t beat_ = 0;
    std::int64_t quiet_ns_ = 0;
};

}  // namespace ferrodist::shm
