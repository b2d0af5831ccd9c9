// SPDX-License-Identifier: MIT OR Apache-2.0
// Progress: the calls of a group that are in flight, and the thread that runs those nobody waits for.
//
// A call in flight is a node in a queue; its arrays are pinned by the Python object that owns it. Whoever waits
// for a call that has not begun takes it out and runs it; the rest is run by one thread of the group, in
// the order of their tickets, asleep while there is none. It takes the GIL only when a call fails, or has
// waited for long. Groups have threads of their own, so their calls never wait for each other.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "core/process.hpp"

namespace ferrodist::bind {

class CallInFlight;

class Progress {
public:
    Progress() : state_(std::make_unique<State>()) {}
    ~Progress() { stop(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    // All of these without the GIL or with it; stop() and wait() let go of nothing.
    void post(CallInFlight& call);
    // Takes a call out that has not begun; false if it has.
    bool claim(CallInFlight& call);
    // Marks a call complete; gives the token of who wants to hear of that, or 0.
    std::uint64_t finish(CallInFlight& call, bool has_failed);
    // Somebody wants to hear of a call, however it ends; false if it is complete, and nobody is told.
    bool hear(CallInFlight& call, std::uint64_t token);
    // Waits until a call is complete, or for a while; tells whether it is.
    bool wait(CallInFlight& call, std::int64_t longest_ns);
    bool is_complete(const CallInFlight& call) const;
    bool is_stopping() const;
    // Whether this thread is one of progress, and about to end.
    static bool is_stopping_here();
    // Ends the thread: a call that it runs is interrupted, those that wait are cut short. None is begun any more.
    void stop();

private:
    struct State {
        std::mutex mutex;
        std::condition_variable posted, finished;
        std::list<CallInFlight*> queue;
        bool is_stopping = false, is_napping = false;
        std::thread thread;
        core::Birth birth;
    };

    static void run(State& state);

    std::unique_ptr<State> state_;
};

// One call: what the queue knows of it.
class CallInFlight {
public:
    enum class State { queued, running, complete };

    virtual ~CallInFlight() = default;
    // Runs it on the progress thread, from its ticket to its end.
    virtual void run() = 0;
    // Ends it, as failed, before it has begun.
    virtual void cut_short() = 0;

    // Guarded by the queue's lock.
    State state = State::queued;
    std::list<CallInFlight*>::iterator place;
    std::int64_t posted_ns = 0;
    std::uint64_t token = 0;        // of who wants to hear of it, if it fails
    bool is_heard_if_done = false;  // and if it is done, too
};

}  // namespace ferrodist::bind
