// SPDX-License-Identifier: MIT OR Apache-2.0
// Waiting for a word that another process will write: spin, then sleep and look round.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shm/futex.hpp"
#include "shm/spins.hpp"

namespace ferrodist::shm {

enum class Outcome : int {
    done,
    mismatch,     // the ranks called different things
    verdict,      // somebody gave a verdict that concerns this call
    late,         // the deadline has passed
    lost,         // the culprit has left or died without doing its part
    silent,       // the culprit shows no sign of life
    interrupted,  // the caller's watch asked to stop
    corrupt,      // the culprit posted what cannot be right
    unexpected,   // a message is not what its receiver expects
    given_up,     // there was a verdict before the call began, or this rank has left
    no_memory,    // there was none for what the call needs besides its arrays
};

// How a call ended, and because of whom.
struct Ending {
    Outcome outcome = Outcome::done;
    int culprit = -1;

    bool failed() const { return outcome != Outcome::done; }
};

// What a wait tells its caller, who may have locks to let go of and signals to hear of.
class Watch {
public:
    virtual ~Watch() = default;
    // The wait is going to take a while.
    virtual void let_go() {}
    // Called about every 50 ms of a wait; false ends it.
    virtual bool look() { return true; }
};

// How one call waits.
struct Patience {
    Watch* watch;
    mutable std::int64_t deadline_ns = 0;  // on the clock of now_ns; 0: none
    Spins* spins = no_spins;  // null: sleeps at once
    std::uint64_t sequence = 0;
    std::int64_t timeout_ns = 0;  // sets the deadline when a wait first takes a while; 0: given

    // A wait begins to take a while: reading the clock earlier would cost every call.
    void begin() const {
        if (timeout_ns != 0 && deadline_ns == 0) {
            deadline_ns = now_ns() + timeout_ns;
        }
        watch->let_go();
    }
    bool is_late() const { return deadline_ns != 0 && now_ns() >= deadline_ns; }
};

constexpr int spins_with_locks = 48;     // before letting go of anything: about a microsecond
constexpr int spins_between_looks = 16;  // at the clock and at the cores of others
constexpr std::int64_t longest_sleep_ns = 50'000'000;
// For so long nothing may move in a call that all ranks have entered, before its deadline ends it. A rank that
// shares its core with others may not run for a good part of that.
constexpr std::int64_t stall_ns = 200'000'000;
constexpr std::int64_t late_sleep_ns = 10'000'000;  // in a call that goes on after its deadline

inline std::int64_t sleep_limit(const Patience& patience) {
    if (patience.deadline_ns == 0) {
        return longest_sleep_ns;
    }
    const std::int64_t rest = patience.deadline_ns - now_ns();
    return rest <= 0 ? late_sleep_ns : std::clamp<std::int64_t>(rest, 1'000, longest_sleep_ns);
}

// Waits until `is_ready()`, which depends on `word`. Whoever changes the word wakes its sleepers if
// `sleepers` is not zero. `lookout.begin()` hears that this takes a while; `lookout.glance()`, which
// must be quick, is asked before the first sleep, `lookout.look()` about every 50 ms; both may end it.
template <class IsReady, class Lookout>
Ending wait_until(const Word& word, Word& sleepers, const Patience& patience, IsReady is_ready,
                  Lookout& lookout) {
    const auto spin = [&](int times) {
        for (int i = 0; i < times; ++i) {
            if (is_ready()) {
                return true;
            }
            pause();
        }
        return is_ready();
    };
    Spins* const spins = patience.spins;
    if (spin(spins == no_spins ? 0 : spins_with_locks)) {
        return {};
    }
    lookout.begin();
    const std::int64_t start = now_ns();
    const auto end = [&] {
        if (spins != no_spins) {
            spins->waited(now_ns() - start);
        }
        return Ending{};
    };
    while (spins != no_spins) {
        const Spins::Step step = spins->next(start, now_ns());
        if (step == Spins::Step::sleep) {
            break;
        }
        if (step == Spins::Step::yield) {
            spins->yield();
        }
        if (spin(step == Spins::Step::yield ? 0 : spins_between_looks)) {
            return end();
        }
    }
    if (const Ending ending = lookout.glance(); ending.failed()) {
        return ending;
    }
    while (true) {
        // Both seq_cst, as are the writer's store and its look at `sleepers`: either this sees the
        // new word, or the writer sees the sleeper. Pairs with Group::publish and Queue's wakes.
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t value = word.load(std::memory_order_seq_cst);
        if (!is_ready()) {
            sleep_on(word, value, sleep_limit(patience));
        }
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (is_ready()) {
            return end();
        }
        if (const Ending ending = lookout.look(); ending.failed()) {
            return ending;
        }
    }
}

}  // namespace ferrodist::shm
