// SPDX-License-Identifier: MIT OR Apache-2.0
// The calls of a group: their order, those that are in flight, and the thread that runs those nobody waits for.
//
// A call in flight is a node in a queue; its arrays are pinned by the Python object that owns it. A thread that waits
// for a call that has not begun takes it out and runs it; the rest is run by one thread of the group, in
// the order of their tickets, asleep while there is none. It takes the GIL only when a call fails, or has
// waited for long. Groups have threads of their own, so their calls never wait for each other.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "bind/collective_call.hpp"
#include "bind/python.hpp"
#include "bind/work.hpp"
#include "core/process.hpp"
#include "core/wait.hpp"

namespace ferrodist::bind {

// Numbers calls from 1; a call runs when all before it have ended. Any thread, with or without the GIL.
class Tickets {
public:
    std::uint64_t take() {
        const std::lock_guard guard(mutex_);
        return ++last_;
    }
    // Takes the next number if nobody has one: such a call runs at once. Else 0.
    std::uint64_t try_take() {
        const std::lock_guard guard(mutex_);
        return last_ == ended_ ? ++last_ : 0;
    }

    // Ends a call, also one that never ran.
    void end(std::uint64_t number) {
        const std::lock_guard guard(mutex_);
        if (number == ended_ + 1 && ended_early_.empty()) {
            ended_ = number;
        } else {
            ended_early_.insert(number);
            while (ended_early_.erase(ended_ + 1) == 1) {
                ++ended_;
            }
        }
        if (num_waiters_ > 0) {
            changed_.notify_all();
        }
    }

    // Waits until all calls before `number` have ended, or for a while; tells whether they have.
    bool wait(std::uint64_t number, std::int64_t longest_ns) {
        std::unique_lock lock(mutex_);
        const auto is_next = [&] { return ended_ + 1 >= number; };
        if (is_next()) {
            return true;
        }
        ++num_waiters_;
        const bool has_come = changed_.wait_for(lock, std::chrono::nanoseconds(longest_ns), is_next);
        --num_waiters_;
        return has_come;
    }

    bool is_idle() const {
        const std::lock_guard guard(mutex_);
        return ended_ == last_;
    }
    // The last call that has ended with all before it.
    std::uint64_t ended() const {
        const std::lock_guard guard(mutex_);
        return ended_;
    }

private:
    mutable std::mutex mutex_;
    std::condition_variable& changed_ = *new std::condition_variable;  // a forked child must not destroy it
    std::uint64_t last_ = 0, ended_ = 0;
    std::set<std::uint64_t> ended_early_;
    int num_waiters_ = 0;
};

// While it lives, Python code that runs on this thread is inside a call of a group: a signal handler, an operation of
// the user's own. A second call of that group would wait there for the first one, below it on the stack.
class InsideCall : core::NonCopyable {
public:
    InsideCall(const Tickets& tickets, std::uint64_t number) : tickets_(tickets), number_(number), outer_(innermost_) {
        innermost_ = this;
    }
    ~InsideCall() { innermost_ = outer_; }

    // The number of the call of a group that this thread is in; 0 if it is in none.
    static std::uint64_t number_of(const Tickets& tickets) {
        const InsideCall* one = innermost_;
        while (one != nullptr && &one->tickets_ != &tickets) {
            one = one->outer_;
        }
        return one == nullptr ? 0 : one->number_;
    }

private:
    static inline thread_local const InsideCall* innermost_ = nullptr;
    const Tickets& tickets_;
    const std::uint64_t number_;
    const InsideCall* const outer_;
};

class FlyingCall;

// The queue, and its thread.
class Progress : core::NonCopyable {
public:
    Progress() : state_(std::make_unique<State>()) {}
    ~Progress() { stop(); }

    // All of these without the GIL or with it; stop() and wait() let go of nothing.

    // Starts the thread unless it runs; throws std::system_error.
    void start();
    // Once it has started.
    void post(FlyingCall& call);
    // Takes a call out that has not begun; false if it has.
    bool claim(FlyingCall& call);
    // Marks a call complete; gives the token of who wants to hear of that, or 0.
    std::uint64_t finish(FlyingCall& call, bool has_failed);
    // Somebody wants to hear of a call, however it ends; false if it is complete, and nobody is told.
    bool hear(FlyingCall& call, std::uint64_t token);
    // Waits until a call is complete, or for a while; tells whether it is.
    bool wait(FlyingCall& call, std::int64_t longest_ns);
    // Queues a call again, before all others, that was claimed and is not begun.
    void put_back(FlyingCall& call);
    bool is_complete(const FlyingCall& call) const;
    bool is_stopping() const;
    // Whether this thread is one of progress, and about to end.
    static bool is_stopping_here();
    // Ends the thread: a call that it runs is interrupted, those that wait are cut short. None is begun any more.
    void stop();

private:
    struct State {
        std::mutex mutex;
        std::condition_variable posted, finished;
        std::list<FlyingCall*> queue;
        bool is_stopping = false, is_napping = false;
        bool is_nap_long = false;  // it ends with the first call that is not short
        int num_claimed = 0;  // calls in a row that were done by threads that waited for them

        // Whether somebody may soon wait for all that is queued, and do it sooner than the thread would.
        bool is_short() const;
        std::thread thread;
        core::Birth birth;
    };

    static void run(State& state);

    std::unique_ptr<State> state_;
};

// What Python sets for the calls of a group, and what is known of them.
struct Calls {
    Tickets tickets;
    bool is_open = true;        // takes calls
    bool reproducible = false;  // part of the fingerprint
    std::int64_t timeout_ns = 0;
    core::Patience patience;      // beyond the timeout
    std::size_t fuse_nbytes = 0;  // up to which arrays of a tree travel together
    std::int64_t carried_nbytes = carries_all;  // up to which ferrodist moves an array itself, and no engine; 
    Progress progress;
};

// When a call gives up, by its own timeout or that of the backend, which alone may be patient.
struct TimeLimit {
    std::int64_t timeout_ns = 0;  // 0: never
    core::Patience patience;

    // Reads what a caller has passed. False: the general path.
    bool read(PyObject* timeout, const Calls& calls);
};

constexpr std::int64_t poll_ns = 50'000'000;

// A collective call in flight, between its Work and the queue of its group.
class FlyingCall : public WorkRequest {
public:
    FlyingCall(Calls& calls, nanobind::handle group, nanobind::handle backend)
        : calls_(calls), group_object_(nanobind::borrow(group)), backend_(nanobind::borrow(backend)) {}

    // Draws the ticket, queues the call and makes its Work.
    static PyObject* start(int kind, std::unique_ptr<FlyingCall> call);

    nanobind::object wait(std::int64_t end_ns) override;
    bool is_complete() override { return calls_.progress.is_complete(*this); }
    bool test() override;
    bool is_next() override { return calls_.tickets.ended() + 1 >= ticket_; }
    bool hear(std::uint64_t its_token) override { return calls_.progress.hear(*this, its_token); }
    nanobind::object on_interrupt(nanobind::object error) override { return error; }  // the call goes on
    nanobind::object backend() override { return backend_; }
    PyObject* group() const override { return group_object_.ptr(); }
    int traverse(visitproc visit, void* arg) const override {
        Py_VISIT(group_object_.ptr());
        Py_VISIT(backend_.ptr());
        return 0;
    }

protected:
    // Runs it on the progress thread, from its ticket to its end.
    virtual void run() = 0;
    // Runs a call that nobody has begun on the thread of who waits for it, which has the GIL.
    virtual void run_here() = 0;
    // Hears of its ticket before it is queued.
    virtual void on_ticket() {}
    // The error of a call that its rank has cut short by leaving.
    nanobind::object left_error() const;
    // The last that is done with the call on a thread that does not own it.
    void complete();
    // At the end of its life: takes it out of the queue, or waits for the thread running it. `abandon` makes that short.
    template <class Abandon>
    void withdraw(const Abandon& abandon) {
        if (ticket_ == 0 || is_complete()) {
            return;
        }
        if (calls_.progress.claim(*this)) {
            calls_.tickets.end(ticket_);
            return;
        }
        abandon();
        const WithoutGil unlocked;
        while (!calls_.progress.wait(*this, poll_ns)) {
        }
    }

    Calls& calls_;
    const nanobind::object group_object_, backend_;
    int kind_ = -1;
    std::uint64_t ticket_ = 0;
    bool is_short_ = false;  // it is done sooner than a thread wakes
    bool is_cut_short_ = false;

private:
    friend class Progress;
    enum class State { queued, running, complete };

    // Ends it, as failed, before it has begun.
    void cut_short();

    // Guarded by the queue's lock.
    State state_ = State::queued;
    std::list<FlyingCall*>::iterator place_;
    std::int64_t posted_ns_ = 0;
    std::uint64_t token_ = 0;        // of who wants to hear of it, if it fails
    bool is_heard_if_done_ = false;  // and if it is done, too
};

// Starts a call whose collectives Python does, one after the other: `running` is a RunningCall of
// ferrodist.backends.running_call, `finish()` makes the result.
nanobind::object start_prepared(Calls& calls, nanobind::handle group, nanobind::handle backend, int kind,
                                nanobind::handle running, nanobind::handle finish);

}  // namespace ferrodist::bind
