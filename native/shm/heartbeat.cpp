// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/heartbeat.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/forks.hpp"
#include "core/held_thread.hpp"

namespace ferrodist::shm {
namespace {

class Heart {
public:
    const core::Birth birth;

    void add(Beat& beat, std::int64_t interval_ns) {
        const std::lock_guard lock(mutex_);
        beats_.push_back({&beat, std::chrono::nanoseconds(interval_ns)});
        if (!thread_.joinable()) {
            is_ending_ = std::make_shared<bool>(false);
            thread_ = start();
        }
        changed_.notify_all();
    }

    void remove(Beat& beat) {
        std::thread ended;
        {
            const std::lock_guard lock(mutex_);
            std::erase_if(beats_, [&](const Entry& entry) { return entry.beat == &beat; });
            if (beats_.empty()) {
                *is_ending_ = true;  // this thread; there may be another one before it notices
                ended.swap(thread_);
            }
            changed_.notify_all();
        }
        if (ended.joinable()) {
            ended.join();
        }
    }

private:
    struct Entry {
        Beat* beat;
        std::chrono::nanoseconds interval;
    };

    // Signals are for the program's own threads: the new one inherits a mask that blocks them all.
    std::thread start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread thread([this, is_ending = is_ending_] { run(*is_ending); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return thread;
    }

    void run(const bool& is_ending) {
        std::unique_lock lock(mutex_);
        while (!is_ending) {
            auto interval = std::chrono::nanoseconds(std::chrono::hours(1));
            const std::int64_t held_ns = core::longest_hold_ns();
            for (const Entry& entry : beats_) {
                // Relaxed, both: a heartbeat orders nothing. Pairs with the loads in HeartbeatTimer and Peer::held_ns.
                entry.beat->held_ns.store(held_ns, std::memory_order_relaxed);
                entry.beat->count.fetch_add(1, std::memory_order_relaxed);
                interval = std::min(interval, entry.interval);
            }
            changed_.wait_for(lock, interval);
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Entry> beats_;
    std::thread thread_;
    std::shared_ptr<bool> is_ending_;  // of the present thread; guarded by the mutex
};

// Never destroyed: a forked child has the parent's but not its thread, and gets one of its own.
Heart& heart() {
    // Acquire and release: who finds a heart finds all of it. Pairs with the exchange below.
    static std::atomic<Heart*> current{nullptr};
    Heart* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->birth.is_of_ancestor()) {
        auto fresh = std::make_unique<Heart>();
        if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
            return *fresh.release();
        }
    }
    return *found;
}

}  // namespace

void start_beating(Beat& beat, std::int64_t interval_ns) { heart().add(beat, interval_ns); }

void stop_beating(Beat& beat) { heart().remove(beat); }

}  // namespace ferrodist::shm
