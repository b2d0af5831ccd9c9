// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/progress.hpp"

#include <chrono>

#include "core/futex.hpp"
#include "core/process.hpp"

namespace ferrodist::bind {
namespace {

constexpr std::int64_t head_start_ns = 50'000, nap_ns = 100'000;
constexpr int most_naps = 10;

thread_local const Progress* runs_here = nullptr;

}  // namespace

bool Progress::is_stopping_here() { return runs_here != nullptr && runs_here->is_stopping(); }

void Progress::post(CallInFlight& call) {
    std::unique_lock lock(state_->mutex);
    if (state_->is_stopping) {
        call.state = CallInFlight::State::running;
        lock.unlock();
        return call.cut_short();
    }
    call.state = CallInFlight::State::queued;
    call.posted_ns = core::now_ns();
    call.place = state_->queue.insert(state_->queue.end(), &call);
    if (!state_->thread.joinable()) {
        state_->thread = core::start_thread([this, state = state_.get()] {
            runs_here = this;
            core::HeldThread::exempt_this_thread();
            run(*state);
        });
    }
    if (!state_->is_napping) {
        state_->posted.notify_one();
    }
}

bool Progress::claim(CallInFlight& call) {
    const std::lock_guard guard(state_->mutex);
    if (call.state != CallInFlight::State::queued) {
        return false;
    }
    state_->queue.erase(call.place);
    call.state = CallInFlight::State::running;
    return true;
}

std::uint64_t Progress::finish(CallInFlight& call, bool has_failed) {
    const std::lock_guard guard(state_->mutex);
    call.state = CallInFlight::State::complete;
    state_->finished.notify_all();
    return has_failed || call.is_heard_if_done ? call.token : 0;
}

bool Progress::hear(CallInFlight& call, std::uint64_t token) {
    const std::lock_guard guard(state_->mutex);
    if (call.state == CallInFlight::State::complete) {
        return false;
    }
    call.token = token;
    call.is_heard_if_done = true;
    return true;
}

bool Progress::wait(CallInFlight& call, std::int64_t longest_ns) {
    std::unique_lock lock(state_->mutex);
    return state_->finished.wait_for(lock, std::chrono::nanoseconds(longest_ns),
                                     [&] { return call.state == CallInFlight::State::complete; });
}

bool Progress::is_complete(const CallInFlight& call) const {
    const std::lock_guard guard(state_->mutex);
    return call.state == CallInFlight::State::complete;
}

bool Progress::is_stopping() const {
    const std::lock_guard guard(state_->mutex);
    return state_->is_stopping;
}

void Progress::stop() {
    if (state_->birth.is_of_ancestor()) {  // a forked child: the thread is its parent's, and the lock may be held
        (void)state_.release();
        state_ = std::make_unique<State>();
        return;
    }
    {
        const std::lock_guard guard(state_->mutex);
        state_->is_stopping = true;
        state_->posted.notify_all();
    }
    if (state_->thread.joinable() && state_->thread.get_id() != std::this_thread::get_id()) {
        state_->thread.join();
    }
    std::list<CallInFlight*> left;
    {
        const std::lock_guard guard(state_->mutex);
        left.swap(state_->queue);
        for (CallInFlight* call : left) {
            call->state = CallInFlight::State::running;
        }
    }
    for (CallInFlight* call : left) {
        call->cut_short();
    }
}

// Takes naps for a while before it sleeps: in a loop of calls that are waited for at once it is not woken by each.
void Progress::run(State& state) {
    pthread_setname_np(pthread_self(), "ferrodist-calls");
    const auto nap = [&](std::unique_lock<std::mutex>& lock, std::int64_t nanoseconds) {
        state.is_napping = true;
        state.posted.wait_for(lock, std::chrono::nanoseconds(nanoseconds), [&] { return state.is_stopping; });
        state.is_napping = false;
    };
    std::unique_lock lock(state.mutex);
    int num_naps = 0;
    while (!state.is_stopping) {
        if (state.queue.empty()) {
            if (++num_naps < most_naps) {
                nap(lock, nap_ns);
            } else {
                state.posted.wait(lock, [&] { return state.is_stopping || !state.queue.empty(); });
                num_naps = 0;
            }
            continue;
        }
        CallInFlight& call = *state.queue.front();
        // Whoever made the call may be about to wait for it, and is quicker.
        if (const std::int64_t rest = call.posted_ns + head_start_ns - core::now_ns(); rest > 0) {
            nap(lock, rest);
            continue;
        }
        state.queue.pop_front();
        call.state = CallInFlight::State::running;
        num_naps = 0;
        lock.unlock();
        call.run();  // ends with finish(): the call may be gone after it
        lock.lock();
    }
}

}  // namespace ferrodist::bind
