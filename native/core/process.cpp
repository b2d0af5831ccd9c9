// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/process.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <string>

#include "core/futex.hpp"

namespace ferrodist::core {
namespace {

// Written only in a new child, where there is no other thread. Relaxed: pairs with nobody.
std::atomic<std::uint32_t> generation{0};

const int is_noted = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

// Since when a thread is held, and whose it is; 0 is a free place.
struct Place {
    std::atomic<std::int64_t> since{0};
    std::atomic<const void*> owner{nullptr};
};

// Threads beyond so many do not count.
struct Board {
    const Birth birth;
    std::array<Place, 256> places{};
};

thread_local bool is_exempt = false;
thread_local const void* owner_of_thread = nullptr;

}  // namespace

namespace {

// The number after a name in a file of /proc; 0 if there is none.
long number_in(const std::string& path, const std::string& name) {
    std::ifstream file(path);
    for (std::string word; file >> word;) {
        if (long number = 0; word == name && file >> number) {
            return number;
        }
    }
    return 0;
}

}  // namespace

bool is_traced(int pidfd) {
    const long pid = number_in("/proc/self/fdinfo/" + std::to_string(pidfd), "Pid:");  // -1: gone
    return pid > 0 && number_in("/proc/" + std::to_string(pid) + "/status", "TracerPid:") > 0;
}

std::uint32_t fork_generation() { return generation.load(std::memory_order_relaxed); }

void Completions::add(std::uint64_t token) {
    {
        const std::lock_guard lock(mutex_);
        tokens_.push_back(token);
    }
    changed_.notify_all();  // one that listened before may wait, too
}

std::uint64_t Completions::begin_listening() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
    return ++listener_;
}

std::vector<std::uint64_t> Completions::take(std::uint64_t listener) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !tokens_.empty() || listener != listener_; });
    return listener == listener_ ? std::exchange(tokens_, {}) : std::vector<std::uint64_t>();
}

void HeldThread::exempt_this_thread() { is_exempt = true; }

void HeldThread::set_owner(const void* owner) { owner_of_thread = owner; }

void HeldThread::begin() {
    if (is_exempt) {
        return;
    }
    const std::int64_t now = now_ns();
    for (Place& place : of_process<Board>().places) {
        std::int64_t free = 0;
        // Relaxed: a hint, which is right a moment later. Pairs with longest_hold_ns.
        if (place.since.compare_exchange_strong(free, now, std::memory_order_relaxed)) {
            place.owner.store(owner_of_thread, std::memory_order_relaxed);
            since_ = &place.since;
            return;
        }
    }
}

std::int64_t longest_hold_ns(const void* owner) {
    std::int64_t first = 0;
    for (const Place& place : of_process<Board>().places) {
        // Both pair with begin, and the latter with let_go.
        if (owner != nullptr && place.owner.load(std::memory_order_relaxed) != owner) {
            continue;
        }
        const std::int64_t since = place.since.load(std::memory_order_relaxed);
        first = since != 0 && (first == 0 || since < first) ? since : first;
    }
    return first == 0 ? 0 : std::max<std::int64_t>(now_ns() - first, 1);
}

}  // namespace ferrodist::core
