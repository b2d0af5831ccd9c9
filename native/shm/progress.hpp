// SPDX-License-Identifier: MIT OR Apache-2.0
// Progress: who moves the messages of a process that shares memory, for all of its groups.
//
// A thread that waits for a request moves all of them. For requests that nobody waits for there is one thread,
// started with the first of them:
//
//     on duty   there are such requests, and nobody has called for a while: it sleeps on the doorbell of
//               the process, wakes when it is rung, and every 50 ms to look for ranks that are gone
//     napping   calls are being made: their threads also move messages, and who rings the doorbell
//               should not have to wake a thread that is not needed. It looks again after some ms
//     parked    there are no such requests: it sleeps until one is posted
//
// One lock guards the messages of all groups. It is never held while waiting, nor while a program's own
// locks are asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/request.hpp"
#include "core/wait.hpp"
#include "shm/layout.hpp"

namespace ferrodist::shm {

class Messages;
class World;

class Progress : core::NonCopyable {
public:
    explicit Progress(World& world);
    ~Progress();

    std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
    Status wait(const Messages& messages, core::Request& request, const WaitOptions& options);
    bool test(core::Request& request);

    // -- with the lock held ----------------------------------------------------------------------

    void add(Messages& messages) { all_.push_back(&messages); }
    void remove(Messages& messages);
    // Starts the thread unless it runs.
    void start();
    // A request was posted that its owner may not wait for.
    void note_unattended();
    Doorbell& doorbell() const { return doorbell_; }

private:
    class WaitPoll;

    bool advance();
    void advance_for(const core::Request& request);
    void check();
    bool has_unattended() const;
    void run();
    void keep_watch(std::unique_lock<std::mutex>& guard);
    std::int64_t longest_sleep() const;

    World& world_;
    Doorbell& doorbell_;
    std::mutex mutex_;
    std::vector<Messages*> all_;
    int num_waiters_ = 0;
    std::uint64_t num_calls_ = 0;
    bool is_parked_ = false, is_ending_ = false;
    // A forked child never destroys it: it would wait for a thread that it does not have.
    std::condition_variable& changed_ = *new std::condition_variable;
    std::thread thread_;
};

}  // namespace ferrodist::shm
