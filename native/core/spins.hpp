// SPDX-License-Identifier: MIT OR Apache-2.0
// Whether a wait spins, yields its core, or sleeps: measured while it waits, not configured.
//
// Who waits for a rank on another core spins. Waking a sleeper takes up to 100 us, and a thread that is woken
// late makes the others wait: unless waits spin for longer than that, all ranks sleep in every round
// from then on. If the awaited rank was preempted this is in vain, but it is a small part of a time
// slice; then the waiting rank sleeps, is put first when it is woken, and both run side by side again.
// After waits that took far longer than spinning does, the next ones spin less.
//
// Who waits while another rank was last seen on its own core would spin in that rank's way. It moves to
// a core without ranks if there is one. Otherwise it yields, until a yield takes long: then it gave the
// core to a process that computes, and that keeps it for a whole time slice. From then on waits sleep,
// and a yield is tried again later.
//
// Who cannot see where all the ranks are yields as well, and spins little while yields take long.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/futex.hpp"

namespace ferrodist::core {

// Puts off what did not pay: each time for longer, unless it paid for a good while in between.
class Backoff {
public:
    bool is_over(std::int64_t now) const { return now >= end_ns_.load(std::memory_order_relaxed); }
    void extend(std::int64_t now);

private:
    // Relaxed: hints of the threads of one process to each other, which guard nothing.
    std::atomic<std::int64_t> end_ns_{0}, length_ns_{0};
};

// How the waits of one process go on. Any of its threads may use it.
class Spins {
public:
    enum class Step { spin, yield, sleep };

    // `cpus[rank]` is the number + 1 of the CPU on which a rank was last seen; 0: on another host, or
    // not known, and then `sees_all` is false.
    Spins(std::vector<Word*> cpus, int rank, bool sees_all = true)
        : cpus_(std::move(cpus)), rank_(static_cast<std::size_t>(rank)), sees_all_(sees_all) {}

    // Shows the others on which CPU this rank is, and returns what it shows.
    std::uint32_t show_cpu() {
        const std::uint32_t cpu = static_cast<std::uint32_t>(sched_getcpu()) + 1;
        Word& shown = *cpus_[rank_];
        // Relaxed, and written only if it changes, so that all keep it in their caches: a hint that
        // pairs with the loads in `next` and `move`.
        if (shown.load(std::memory_order_relaxed) != cpu) {
            shown.store(cpu, std::memory_order_relaxed);
        }
        return cpu;
    }

    // What a wait does that began at `start` and is not over.
    Step next(std::int64_t start, std::int64_t now);
    // Yields the core, and notes how long that took.
    void yield();
    // A wait is over that took so long.
    void waited(std::int64_t ns);

    static constexpr std::int64_t longest_ns = 300'000, shortest_ns = 20'000;

private:
    bool move();

    const std::vector<Word*> cpus_;
    const std::size_t rank_;
    const bool sees_all_;
    std::atomic<std::int64_t> spin_ns_{longest_ns};  // relaxed, as those of Backoff
    Backoff yields_, moves_;
};

constexpr Spins* no_spins = nullptr;

}  // namespace ferrodist::core
