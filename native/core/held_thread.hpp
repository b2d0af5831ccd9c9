// SPDX-License-Identifier: MIT OR Apache-2.0
// How long threads of this process have been waiting, each in one call: what other ranks know of this one, in all its
// groups, before they give up a call that it has not come to.
#pragma once

#include <atomic>
#include <cstdint>

namespace ferrodist::core {

// A thread while a call of the program holds it. A call in flight that nobody waits for holds none.
class HeldThread {
public:
    HeldThread() = default;
    ~HeldThread() { let_go(); }
    HeldThread(const HeldThread&) = delete;
    HeldThread& operator=(const HeldThread&) = delete;

    // The thread waits; the first of these is taken for the beginning of the wait.
    void note() {
        if (since_ == nullptr) {
            begin();
        }
    }
    // The call has got on.
    void let_go() {
        if (since_ != nullptr) {
            since_->store(0, std::memory_order_relaxed);  // pairs with longest_hold_ns; orders nothing
            since_ = nullptr;
        }
    }

    // The calling thread makes progress for others: nothing that it waits for counts.
    static void exempt_this_thread();

private:
    void begin();

    std::atomic<std::int64_t>* since_ = nullptr;
};

// How long that thread has been held that has been held for longest; 0: none is.
std::int64_t longest_hold_ns();

}  // namespace ferrodist::core
