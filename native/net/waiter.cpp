// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/waiter.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ferrodist::net {
namespace {

using Step = shm::Spins::Step;

constexpr std::int64_t ms = 1'000'000;

}  // namespace

Waiter::Waiter(Mesh& mesh, Lock& lock, const Patience& patience)
    : mesh_(mesh), lock_(lock), patience_(patience) {
    ++mesh_.num_callers_;
    ++mesh_.num_calls_;
    const std::int64_t now = shm::now_ns();
    next_look_ns_ = now + shm::longest_sleep_ns;
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
    if (patience_.spins != shm::no_spins && start_ns_ != 0) {
        patience_.spins->waited(shm::now_ns() - start_ns_);
    }
    start_ns_ = 0;
}

shm::Spins::Step Waiter::next_step(std::int64_t now) {
    if (patience_.spins == shm::no_spins) {
        return Step::sleep;
    }
    start_ns_ = start_ns_ == 0 ? now : start_ns_;
    return patience_.spins->next(start_ns_, now);
}

bool Waiter::is_time_to_look() { return std::exchange(was_asked_, false); }

Ending Waiter::until_change(std::uint64_t tick) {
    while (true) {
        const std::int64_t now = shm::now_ns();
        if (patience_.deadline_ns != 0 && now >= patience_.deadline_ns) {
            return {Outcome::late};
        }
        if (now >= next_look_ns_) {
            return look();
        }
        if (mesh_.tick_ != tick) {
            return {};
        }
        const std::int64_t rest = std::min(next_look_ns_ - now, shm::sleep_limit(patience_));
        if (mesh_.is_polling_) {
            ++mesh_.num_sleepers_;
            mesh_.changed_.wait_for(lock_, std::chrono::nanoseconds(rest));
            --mesh_.num_sleepers_;
            continue;
        }
        const Step step = next_step(now);
        mesh_.is_polling_ = true;
        if (!mesh_.handle_events(step == Step::sleep ? static_cast<int>(rest / ms + 1) : 0, lock_)) {
            next_look_ns_ = 0;  // a signal: the program may want to hear of it
        }
        mesh_.is_polling_ = false;
        if (mesh_.num_sleepers_ > 0) {
            mesh_.changed_.notify_all();
        }
        if (step == Step::yield && mesh_.tick_ == tick) {
            lock_.unlock();
            patience_.spins->yield();
            lock_.lock();
        }
    }
}

// Lets the program hear of signals and tell of a long wait.
Ending Waiter::look() {
    lock_.unlock();
    const bool goes_on = patience_.watch->look();
    lock_.lock();
    next_look_ns_ = shm::now_ns() + shm::longest_sleep_ns;
    was_asked_ = true;
    return goes_on ? Ending{} : Ending{Outcome::interrupted};
}

}  // namespace ferrodist::net
