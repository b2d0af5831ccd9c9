// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/spins.hpp"

#include <algorithm>

namespace ferrodist::core {
namespace {

constexpr std::int64_t ms = 1'000'000;
constexpr std::int64_t shortest_backoff = 20 * ms, longest_backoff = 1'000 * ms;
// Ranks that take turns on a core give it back sooner, one that computes has it for a time slice.
constexpr std::int64_t long_yield = 500'000;

}  // namespace

void Backoff::extend(std::int64_t now) {
    const std::int64_t length = length_ns_.load(std::memory_order_relaxed);
    const bool is_soon = now - end_ns_.load(std::memory_order_relaxed) < 4 * length;
    const std::int64_t longer = is_soon ? std::min(2 * length, longest_backoff) : shortest_backoff;
    length_ns_.store(longer, std::memory_order_relaxed);
    end_ns_.store(now + longer, std::memory_order_relaxed);
}

Spins::Step Spins::next(std::int64_t start, std::int64_t now) {
    if (now - start >= spin_ns_.load(std::memory_order_relaxed)) {
        return Step::sleep;
    }
    const std::uint32_t cpu = show_cpu();
    for (std::size_t rank = 0; rank < cpus_.size(); ++rank) {
        if (rank == rank_ || cpus_[rank]->load(std::memory_order_relaxed) != cpu) {  // pairs with show_cpu
            continue;
        }
        // Of two ranks the later one moves, lest both do.
        if (rank < rank_ && moves_.is_over(now)) {
            moves_.extend(now);
            if (move()) {
                return Step::spin;
            }
        }
        return yields_.is_over(now) ? Step::yield : Step::sleep;
    }
    if (sees_all_) {
        return Step::spin;
    }
    if (yields_.is_over(now)) {
        return Step::yield;
    }
    return now - start < shortest_ns ? Step::spin : Step::sleep;
}

void Spins::yield() {
    const std::int64_t start = now_ns();
    sched_yield();
    if (const std::int64_t end = now_ns(); end - start > long_yield) {
        yields_.extend(end);
    }
}

void Spins::waited(std::int64_t ns) {
    const std::int64_t before = spin_ns_.load(std::memory_order_relaxed);
    const std::int64_t after = ns < 2 * longest_ns ? longest_ns : std::max(before / 2, shortest_ns);
    if (after != before) {
        spin_ns_.store(after, std::memory_order_relaxed);
    }
}

// Moves this thread to a core on which no rank was seen; false if there is none. The thread may use
// the same cores as before.
bool Spins::move() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return false;
    }
    cpu_set_t vacant = allowed;
    for (const Word* const shown : cpus_) {
        if (const std::uint32_t cpu = shown->load(std::memory_order_relaxed); cpu != 0) {  // pairs with show_cpu
            CPU_CLR(cpu - 1, &vacant);
        }
    }
    if (CPU_COUNT(&vacant) == 0 || sched_setaffinity(0, sizeof(vacant), &vacant) != 0) {
        return false;
    }
    sched_setaffinity(0, sizeof(allowed), &allowed);
    show_cpu();
    return true;
}

}  // namespace ferrodist::core
