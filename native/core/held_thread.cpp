// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/held_thread.hpp"

#include <algorithm>
#include <array>
#include <memory>

#include "core/forks.hpp"
#include "core/futex.hpp"

namespace ferrodist::core {
namespace {

// Since when each thread is held; 0 is a free place. Those beyond so many do not count.
struct Board {
    const Birth birth;
    std::array<std::atomic<std::int64_t>, 256> since{};
};

// Never destroyed. A forked child has the parent's, but not its threads, and gets one of its own.
Board& board() {
    // Acquire and release: who finds a board finds all of it. Pairs with the exchange below.
    static std::atomic<Board*> current{nullptr};
    Board* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->birth.is_of_ancestor()) {
        auto fresh = std::make_unique<Board>();
        if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
            return *fresh.release();
        }
    }
    return *found;
}

thread_local bool is_exempt = false;

}  // namespace

void HeldThread::exempt_this_thread() { is_exempt = true; }

void HeldThread::begin() {
    if (is_exempt) {
        return;
    }
    const std::int64_t now = now_ns();
    for (std::atomic<std::int64_t>& place : board().since) {
        std::int64_t free = 0;
        // Relaxed: a place holds nothing but itself. Pairs with longest_hold_ns.
        if (place.compare_exchange_strong(free, now, std::memory_order_relaxed)) {
            since_ = &place;
            return;
        }
    }
}

std::int64_t longest_hold_ns() {
    std::int64_t first = 0;
    for (const std::atomic<std::int64_t>& place : board().since) {
        const std::int64_t since = place.load(std::memory_order_relaxed);  // pairs with begin and let_go
        first = since != 0 && (first == 0 || since < first) ? since : first;
    }
    return first == 0 ? 0 : std::max<std::int64_t>(now_ns() - first, 1);
}

}  // namespace ferrodist::core
