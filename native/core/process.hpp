// SPDX-License-Identifier: MIT OR Apache-2.0
// What there is once per process: who made it, threads of ours, what has completed, which threads are held.
//
// Children of fork() have copies of what belongs to the parent, and must not change what it shares.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/noncopyable.hpp"

namespace ferrodist::core {

// How often the memory of this process has been copied by fork() since it first asked: whatever was
// made under another number belongs to an ancestor.
std::uint32_t fork_generation();

// Remembers who made the object it is part of.
class Birth {
public:
    bool is_of_ancestor() const { return generation_ != fork_generation(); }

private:
    std::uint32_t generation_ = fork_generation();
};

// The only T of this process, which has a `birth`. Never destroyed: threads may still be in it when the program
// ends. A forked child has the parent's, but not its threads, and gets one of its own.
template <class T>
T& of_process() {
    // Acquire and release: who finds one finds all of it. Pairs with the exchange below.
    static std::atomic<T*> current{nullptr};
    T* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->birth.is_of_ancestor()) {
        auto fresh = std::make_unique<T>();
        if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
            return *fresh.release();
        }
    }
    return *found;
}

// Starts a thread that no signal is handled on: they are for the program's own threads.
template <class Run>
std::thread start_thread(Run run) {
    struct SignalMask {
        sigset_t before;
        ~SignalMask() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }  // also if there are no more threads
    } mask;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask.before);
    return std::thread(std::move(run));
}

// Whether a debugger holds the process of a pidfd, so that its silence means nothing. False if that cannot be known.
bool is_traced(int pidfd);

// The requests of this process that have completed and that the program is notified of, by their tokens. One thread
// of the program waits for them, and is asleep while there are none.
class Completions {
public:
    static Completions& of_process() { return core::of_process<Completions>(); }

    void add(std::uint64_t token);
    // Makes a thread the one that takes them, by the number this gives; the one before gets none any more.
    std::uint64_t begin_listening();
    // Waits for the next ones; empty if another thread takes them.
    std::vector<std::uint64_t> take(std::uint64_t listener);

    const Birth birth;

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint64_t> tokens_;
    std::uint64_t listener_ = 0;
};

// A thread while a call of the program holds it. A call in flight that nobody waits for holds none.
class HeldThread : NonCopyable {
public:
    ~HeldThread() { let_go(); }

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
    // Whose the calling thread is from now on, where the ranks of a process are threads; null: the process's.
    static void set_owner(const void* owner);

private:
    void begin();

    std::atomic<std::int64_t>* since_ = nullptr;
};

// How long that thread of an owner (null: of the process) has been held in one call that has been held for longest; 0:
// none is. It is what other ranks know of this one, in all its groups, before they give up a call that it has not come to.
std::int64_t longest_hold_ns(const void* owner = nullptr);

}  // namespace ferrodist::core
