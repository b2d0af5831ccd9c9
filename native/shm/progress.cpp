// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/progress.hpp"

#include <algorithm>
#include <chrono>

#include "shm/messages.hpp"
#include "shm/world.hpp"

namespace ferrodist::shm {
namespace {

constexpr std::chrono::milliseconds nap{2};
constexpr int naps_before_parking = 10;
constexpr int most_sweeps = 4096;  // then the one who waits looks at its deadline

}  // namespace

Progress::Progress(World& world) : world_(world), doorbell_(world.peer(world.rank()).header().doorbell) {}

Progress::~Progress() {
    if (world_.is_of_ancestor()) {
        if (thread_.joinable()) {
            thread_.detach();  // it is not in this process
        }
        return;
    }
    {
        const auto guard = lock();
        is_ending_ = true;
        changed_.notify_all();
        doorbell_.ring();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
    delete &changed_;
}

void Progress::remove(Messages& messages) { std::erase(all_, &messages); }

bool Progress::advance() {
    bool has_moved = false;
    for (Messages* one : all_) {
        has_moved = one->advance() || has_moved;
    }
    return has_moved;
}

void Progress::check() {
    for (Messages* one : all_) {
        one->check();
    }
}

bool Progress::has_unattended() const {
    return std::any_of(all_.begin(), all_.end(), [](const Messages* one) { return one->has_unattended(); });
}

// -- waiting -----------------------------------------------------------------------------------------

// What a wait looks at, now and then.
class Progress::WaitPoll : core::NonCopyable {
public:
    WaitPoll(Progress& progress, const Messages& messages, const core::Request& request, const WaitOptions& options)
        : progress_(progress), messages_(messages), request_(request), options_(options) {}
    ~WaitPoll() {
        if (has_begun_) {
            const auto guard = progress_.lock();
            --progress_.num_waiters_;
        }
    }

    void begin() {
        options_.begin();
        const auto guard = progress_.lock();
        ++progress_.num_waiters_;
        has_begun_ = true;
    }

    Status check() const {
        const auto guard = progress_.lock();
        progress_.check();
        return {};
    }

    Status poll() {
        check();
        if (options_.is_late() && !messages_.may_still_come(request_, options_)) {
            return {StatusCode::late};
        }
        if (now_ns() < next_poll_ns_) {
            return {};
        }
        next_poll_ns_ = now_ns() + longest_sleep_ns / 2;
        if (has_moved()) {
            options_.hook->progressed();
        }
        return {options_.hook->poll() ? StatusCode::done : StatusCode::interrupted};
    }

private:
    bool has_moved() {
        const auto guard = progress_.lock();
        const std::uint64_t before = moves_;
        moves_ = request_.is_complete() ? moves_ : messages_.moves_of(request_);
        return moves_ != before;
    }

    Progress& progress_;
    const Messages& messages_;
    const core::Request& request_;
    const WaitOptions& options_;
    std::uint64_t moves_ = 0;
    bool has_begun_ = false;
    std::int64_t next_poll_ns_ = 0;
};

// Moves messages until nothing moves any more, or the request is complete.
void Progress::advance_for(const core::Request& request) {
    for (int i = 0; i < most_sweeps && !request.is_complete() && advance(); ++i) {
    }
}

Status Progress::wait(const Messages& messages, core::Request& request, const WaitOptions& options) {
    const auto is_ready = [&] {
        if (!request.is_complete()) {
            const auto guard = lock();
            advance_for(request);
        }
        return request.is_complete();
    };
    {
        const auto guard = lock();
        ++num_calls_;
        advance_for(request);
    }
    if (request.is_complete()) {
        return {};
    }
    WaitPoll wait_poll(*this, messages, request, options);
    const Status status = wait_until(doorbell_.rings, doorbell_.sleepers, options, is_ready, wait_poll);
    return request.is_complete() ? Status{} : status;
}

bool Progress::test(core::Request& request) {
    if (!request.is_complete()) {
        const auto guard = lock();
        ++num_calls_;
        advance_for(request);
    }
    return request.is_complete();
}

// -- the thread ----------------------------------------------------------------------------------------

void Progress::start() {
    if (!thread_.joinable()) {
        thread_ = core::start_thread([this] { run(); });
    }
}

void Progress::note_unattended() {
    ++num_calls_;
    if (is_parked_) {
        is_parked_ = false;
        changed_.notify_all();
    }
    start();
}

void Progress::run() {
    auto guard = lock();
    std::uint64_t calls_before = 0;
    int num_idle_naps = 0;
    while (!is_ending_) {
        const bool is_needed = has_unattended();
        if (!is_needed && ++num_idle_naps > naps_before_parking) {
            is_parked_ = true;
            changed_.wait(guard, [&] { return !is_parked_ || is_ending_; });
            num_idle_naps = 0;
        } else if (!is_needed || num_waiters_ > 0 || num_calls_ != calls_before) {
            calls_before = num_calls_;
            num_idle_naps = is_needed ? 0 : num_idle_naps;
            changed_.wait_for(guard, nap);
        } else {
            keep_watch(guard);
        }
    }
}

// Sleeps on the doorbell and moves what has come, as Doorbell says.
void Progress::keep_watch(std::unique_lock<std::mutex>& guard) {
    // Both seq_cst: either this sees what has come, or who rings sees the sleeper. Pairs with Doorbell::ring.
    doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t value = doorbell_.rings.load(std::memory_order_seq_cst);
    if (!advance() && !is_ending_) {
        const std::int64_t limit = longest_sleep();
        guard.unlock();
        sleep_on(doorbell_.rings, value, limit);
        guard.lock();
    }
    doorbell_.sleepers.fetch_sub(1, std::memory_order_relaxed);  // a ring too many costs nothing
    advance();
    check();
}

std::int64_t Progress::longest_sleep() const {
    std::int64_t limit = longest_sleep_ns;
    const std::int64_t now = now_ns();
    for (const Messages* one : all_) {
        if (const std::int64_t deadline = one->next_deadline(); deadline != 0) {
            limit = std::clamp<std::int64_t>(deadline - now, 1'000, limit);
        }
    }
    return limit;
}

}  // namespace ferrodist::shm
