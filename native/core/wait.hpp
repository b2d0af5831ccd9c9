// SPDX-License-Identifier: MIT OR Apache-2.0
// Waiting for a word that another process will write: spin, then sleep and look round.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/futex.hpp"
#include "core/spins.hpp"

namespace ferrodist::core {

enum class StatusCode : int {
    done,
    mismatch,     // the ranks called different things
    group_error,  // somebody set a group error that concerns this call
    late,         // the deadline has passed
    lost,         // the failed rank has left or died without doing its part
    no_heartbeat, // the failed rank shows no heartbeat
    interrupted,  // the caller's hook asked to stop
    corrupt,      // the failed rank posted what cannot be right
    unexpected,   // a message is not what its receiver expects
    given_up,     // there was a group error before the call began, or this rank has left
    no_memory,    // there was none for what the call needs besides its arrays
    other_kind,   // the next message is an object where an array is received, or the other way round; it stays
    cancelled,    // a receive was withdrawn by who posted it
};

// How a call ended, and because of whom.
struct Status {
    StatusCode code = StatusCode::done;
    int failed_rank = -1;

    bool failed() const { return code != StatusCode::done; }
};

// What a wait tells its caller, who may have locks to let go of and signals to hear of.
class ProgressHook {
public:
    virtual ~ProgressHook() = default;
    // The wait is going to take a while.
    virtual void let_go() {}
    // Called about every 50 ms of a wait; false ends it.
    virtual bool poll() { return true; }
    // What was waited for has come, or some of it: the call gets on.
    virtual void progressed() {}
};

// The default timeout is patient with the living: beyond the deadline a wait goes on as long as all that it waits for
// are there and not stuck. All 0: the deadline is exact.
struct Patience {
    std::int64_t longest_ns = 0;  // how far beyond the deadline
    std::int64_t stuck_ns = 0;    // who has been held for so long in one other call is stuck
};

// How one call waits.
struct WaitOptions {
    ProgressHook* hook;
    mutable std::int64_t deadline_ns = 0;  // on the clock of now_ns; 0: none
    Spins* spins = no_spins;  // null: sleeps at once
    std::uint64_t sequence = 0;
    std::int64_t timeout_ns = 0;  // sets the deadline when a wait first takes a while; 0: given
    Patience patience = {};
    mutable std::int64_t last_deadline_ns = 0;  // of the patience: the deadline may be put off meanwhile

    // A wait begins to take a while: reading the clock earlier would cost every call.
    void begin() const {
        if (timeout_ns != 0 && deadline_ns == 0) {
            deadline_ns = now_ns() + timeout_ns;
        }
        hook->let_go();
    }
    bool is_late() const { return deadline_ns != 0 && now_ns() >= deadline_ns; }
    // Whether the wait may go on though its deadline is over.
    bool is_patient() const {
        if (patience.stuck_ns == 0) {
            return false;
        }
        last_deadline_ns = last_deadline_ns == 0 ? deadline_ns + patience.longest_ns : last_deadline_ns;
        return now_ns() < last_deadline_ns;
    }
};

constexpr int spins_with_locks = 48;     // before letting go of anything: about a microsecond
constexpr int spins_between_checks = 16;  // at the clock and at the cores of others
constexpr std::int64_t longest_sleep_ns = 50'000'000;
// For so long nothing may move in a call that all ranks have entered, before its deadline ends it. A rank that
// shares its core with others may not run for a good part of that.
constexpr std::int64_t stall_ns = 200'000'000;
constexpr std::int64_t late_sleep_ns = 10'000'000;  // in a call that goes on after its deadline
constexpr std::int64_t patient_look_ns = 200'000'000;  // between looks whether a rank is stuck

inline std::int64_t sleep_limit(const WaitOptions& options) {
    if (options.deadline_ns == 0) {
        return longest_sleep_ns;
    }
    const std::int64_t rest = options.deadline_ns - now_ns();
    if (rest <= 0) {
        return options.is_patient() ? longest_sleep_ns : late_sleep_ns;
    }
    return std::clamp<std::int64_t>(rest, 1'000, longest_sleep_ns);
}

// Waits until `is_ready()`, which depends on `word`. Who changes the word wakes its sleepers if
// `sleepers` is not zero. `wait_poll.begin()` hears that this takes a while; `wait_poll.check()`, which
// must be quick, is asked before the first sleep, `wait_poll.poll()` about every 50 ms; both may end it.
template <class IsReady, class WaitPoll>
Status wait_until(const Word& word, Word& sleepers, const WaitOptions& options, IsReady is_ready,
                  WaitPoll& wait_poll) {
    const auto spin = [&](int times) {
        for (int i = 0; i < times; ++i) {
            if (is_ready()) {
                return true;
            }
            pause();
        }
        return is_ready();
    };
    Spins* const spins = options.spins;
    if (spin(spins == no_spins ? 0 : spins_with_locks)) {
        return {};
    }
    wait_poll.begin();
    const std::int64_t start = now_ns();
    const auto end = [&] {
        if (spins != no_spins) {
            spins->waited(now_ns() - start);
        }
        return Status{};
    };
    while (spins != no_spins) {
        const Spins::Step step = spins->next(start, now_ns());
        if (step == Spins::Step::sleep) {
            break;
        }
        if (step == Spins::Step::yield) {
            spins->yield();
        }
        if (spin(step == Spins::Step::yield ? 0 : spins_between_checks)) {
            return end();
        }
    }
    if (const Status status = wait_poll.check(); status.failed()) {
        return status;
    }
    while (true) {
        // Both seq_cst, as are the writer's store and its look at `sleepers`: either this sees the
        // new word, or the writer sees the sleeper. Pairs with Group::publish, Group::end_staging and Doorbell::ring.
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t value = word.load(std::memory_order_seq_cst);
        if (!is_ready()) {
            sleep_on(word, value, sleep_limit(options));
        }
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (is_ready()) {
            options.hook->progressed();
            return end();
        }
        if (const Status status = wait_poll.poll(); status.failed()) {
            return status;
        }
    }
}

}  // namespace ferrodist::core
