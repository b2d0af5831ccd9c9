// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/waiter.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ferrodist::net {
namespace {

using Step = core::Spins::Step;

constexpr std::int64_t ms = 1'000'000;

}  // namespace

Waiter::Waiter(Mesh& mesh, Lock& lock, const WaitOptions& options)
    : mesh_(mesh), lock_(lock), options_(options) {
    ++mesh_.num_callers_;
    ++mesh_.num_calls_;
    core::HeldThread::set_owner(mesh_.owner());
    const std::int64_t now = core::now_ns();
    next_poll_ns_ = now + core::longest_sleep_ns;
}

Waiter::~Waiter() {
    if (!lock_.owns_lock()) {
        lock_.lock();
    }
    --mesh_.num_callers_;
    if (mesh_.num_sleepers_ > 0) {
        mesh_.changed_.notify_all();
    }
}

void Waiter::progressed() {
    if (options_.spins != core::no_spins && start_ns_ != 0) {
        options_.spins->waited(core::now_ns() - start_ns_);
    }
    start_ns_ = 0;
    if (has_polled_) {
        has_polled_ = false;
        options_.hook->progressed();
    }
}

core::Spins::Step Waiter::next_step(std::int64_t now) {
    if (options_.spins == core::no_spins) {
        return Step::sleep;
    }
    start_ns_ = start_ns_ == 0 ? now : start_ns_;
    return options_.spins->next(start_ns_, now);
}

bool Waiter::is_time_to_poll() { return std::exchange(was_asked_, false); }

Status Waiter::until_change(std::uint64_t epoch) {
    while (true) {
        const std::int64_t now = core::now_ns();
        if (options_.deadline_ns != 0 && now >= options_.deadline_ns) {
            return {StatusCode::late};
        }
        if (now >= next_poll_ns_) {
            return poll();
        }
        if (mesh_.epoch_ != epoch) {
            return {};
        }
        const std::int64_t rest = std::min(next_poll_ns_ - now, core::sleep_limit(options_));
        if (mesh_.is_polling_) {
            ++mesh_.num_sleepers_;
            mesh_.changed_.wait_for(lock_, std::chrono::nanoseconds(rest));
            --mesh_.num_sleepers_;
            continue;
        }
        const Step step = next_step(now);
        mesh_.is_polling_ = true;
        if (!mesh_.handle_events(step == Step::sleep ? static_cast<int>(rest / ms + 1) : 0, lock_)) {
            next_poll_ns_ = 0;  // a signal: the program may want to hear of it
        }
        mesh_.is_polling_ = false;
        if (mesh_.num_sleepers_ > 0) {
            mesh_.changed_.notify_all();
        }
        if (step == Step::yield && mesh_.epoch_ == epoch) {
            lock_.unlock();
            options_.spins->yield();
            lock_.lock();
        }
    }
}

// Lets the program hear of signals and tell of a long wait.
Status Waiter::poll() {
    lock_.unlock();
    const bool goes_on = options_.hook->poll();
    lock_.lock();
    next_poll_ns_ = core::now_ns() + core::longest_sleep_ns;
    was_asked_ = has_polled_ = true;
    return goes_on ? Status{} : Status{StatusCode::interrupted};
}

}  // namespace ferrodist::net
