// SPDX-License-Identifier: MIT OR Apache-2.0
// Completions: the requests of this process that have completed and that somebody wants to hear of, by
// their tokens. One thread of the program waits for them, and is asleep while there are none.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/forks.hpp"

namespace ferrodist::core {

class Completions {
public:
    // Those of this process: a forked child begins with none.
    static Completions& of_process();

    void add(std::uint64_t token);
    // Waits for the next ones; empty when so many nanoseconds have passed.
    std::vector<std::uint64_t> take(std::int64_t timeout_ns);

private:
    const core::Birth birth_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint64_t> tokens_;
};

}  // namespace ferrodist::core
