// SPDX-License-Identifier: MIT OR Apache-2.0
// A word to sleep on, for whoever waits for something that is said elsewhere.
#pragma once

#include "core/futex.hpp"

namespace ferrodist::shm {

using namespace core;

// The sleeper counts itself, reads `rings`, looks once more at what it waits for, and sleeps while
// `rings` stays the same: that is wait_until(rings, sleepers, ...). The ringer changes what is waited
// for, then rings. The change and the look at it have to be seq_cst, as is all of this: so either the
// sleeper sees the change or the ringer sees the sleeper. While nobody sleeps a ring is but a read.
struct Doorbell {
    Word rings;
    Word sleepers;

    void ring() {
        // Pairs with the sleeper's fetch_add in wait_until.
        if (sleepers.load(std::memory_order_seq_cst) != 0) {
            rings.fetch_add(1, std::memory_order_seq_cst);  // pairs with the sleeper's load there
            wake_all(rings);
        }
    }
};
static_assert(sizeof(Doorbell) == 8);

}  // namespace ferrodist::shm
