// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/completions.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

namespace ferrodist::core {

// Never destroyed: threads may still be in it when the program ends.
Completions& Completions::of_process() {
    // Acquire and release: who finds one finds all of it. Pairs with the exchange below.
    static std::atomic<Completions*> current{nullptr};
    Completions* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->birth_.is_of_ancestor()) {
        auto fresh = std::make_unique<Completions>();
        if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
            return *fresh.release();
        }
    }
    return *found;
}

void Completions::add(std::uint64_t token) {
    {
        const std::lock_guard lock(mutex_);
        tokens_.push_back(token);
    }
    changed_.notify_one();
}

std::vector<std::uint64_t> Completions::take(std::int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return !tokens_.empty(); });
    return std::exchange(tokens_, {});
}

}  // namespace ferrodist::core
