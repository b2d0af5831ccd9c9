// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory for messages that nobody has asked for yet: there may be none, and tests see to that.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>

namespace ferrodist::core {

// Says whether there is memory; null outside of tests. Relaxed: the test and who allocates meet elsewhere. Pairs with
// the stores of tests.
inline std::atomic<bool (*)(std::size_t nbytes)> has_memory{nullptr};

// Throws std::bad_alloc where a test wants no memory to be left for an unexpected message.
inline void require_memory(std::size_t nbytes) {
    if (bool (*const check)(std::size_t) = has_memory.load(std::memory_order_relaxed); check != nullptr && !check(nbytes)) {
        throw std::bad_alloc();
    }
}

}  // namespace ferrodist::core
