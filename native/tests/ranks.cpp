// SPDX-License-Identifier: MIT OR Apache-2.0
#include "ranks.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <system_error>
#include <thread>

#include "check.hpp"

namespace ferrodist::core {

std::ostream& operator<<(std::ostream& stream, StatusCode code) {
    constexpr const char* names[] = {"done",   "mismatch",    "group_error", "late",       "lost",
                                     "no_heartbeat", "interrupted", "corrupt", "unexpected", "given_up"};
    return stream << names[static_cast<int>(code)];
}

}  // namespace ferrodist::core

namespace ferrodist::tests {

core::WaitOptions options_of(core::ProgressHook& hook, std::uint64_t sequence, std::int64_t timeout_ns, core::Spins* spins) {
    return {&hook, core::now_ns() + timeout_ns, spins, sequence};
}

core::Status meet_all(shm::Group& group, std::uint64_t sequence, std::int64_t timeout_ns,
                     std::uint64_t fingerprint) {
    CountingHook hook;
    shm::Task task{shm::Kind::barrier};
    task.fingerprint = fingerprint;
    return shm::run(group, task, options_of(hook, sequence, timeout_ns, group.spins()));
}

core::Status meet_all(shm::Group& group, std::uint64_t sequence, core::ProgressHook& hook) {
    return shm::run(group, shm::Task{shm::Kind::barrier}, options_of(hook, sequence, very_long, group.spins()));
}

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) {
            cpus.push_back(cpu);
        }
    }
    return cpus;
}

void stay_on(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        CPU_SET(static_cast<std::size_t>(cpu), &set);
    }
    CHECK_EQUAL(sched_setaffinity(0, sizeof(set), &set), 0);
}

void run_threads(int count, const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
        threads.emplace_back([&work, rank] {
            try {
                work(rank);
            } catch (const std::exception& error) {
                fail("rank", rank, error.what());
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

std::shared_ptr<shm::Group> first_group(const std::shared_ptr<shm::World>& world) {
    std::vector<int> members(static_cast<std::size_t>(world->size()));
    std::iota(members.begin(), members.end(), 0);
    std::byte* const block = world->peer(0).at(shm::first_block, shm::GroupLayout::nbytes(members.size()));
    const auto own = world->rank() == 0 ? std::optional(shm::first_block) : std::nullopt;
    return std::make_shared<shm::Group>(world, members, world->rank(), block, own, nullptr);
}

Host::Host(int size, std::int64_t heartbeat_timeout_ns, std::size_t arena_nbytes)
    : ranks_(static_cast<std::size_t>(size)) {
    std::vector<int> watches;
    for (Rank& rank : ranks_) {
        int ends[2];
        if (pipe(ends) != 0) {
            throw std::system_error(errno, std::generic_category(), "pipe");
        }
        watches.push_back(ends[0]);
        rank.lifeline = ends[1];
        const bool is_first = &rank == &ranks_.front();
        rank.arena = shm::make_arena(is_first ? shm::GroupLayout::nbytes(ranks_.size()) : 0, arena_nbytes);
    }
    for (int rank = 0; rank < size; ++rank) {
        std::vector<shm::Peer> peers;
        for (int peer = 0; peer < size; ++peer) {
            const int hook = peer == rank ? -1 : dup(watches[static_cast<std::size_t>(peer)]);
            peers.push_back({arena(peer).base(), arena(peer).nbytes(), hook, nullptr});
        }
        at(rank).world = std::make_shared<shm::World>(rank, at(rank).arena, std::move(peers),
                                                      20 * millisecond, heartbeat_timeout_ns);
        at(rank).group = first_group(at(rank).world);
    }
    for (const int hook : watches) {
        ::close(hook);
    }
}

Host::~Host() {
    for (Rank& rank : ranks_) {
        rank.group.reset();
    }
    for (Rank& rank : ranks_) {
        rank.world.reset();
        if (rank.lifeline >= 0) {
            ::close(rank.lifeline);
        }
    }
}

void Host::run(const std::function<void(shm::Group&)>& work) {
    run_threads(size(), [&](int rank) { work(*group(rank)); });
}

void Host::close(int rank) {
    at(rank).group.reset();
    at(rank).world.reset();
}

void Host::kill(int rank) {
    ::close(at(rank).lifeline);
    at(rank).lifeline = -1;
}

bool is_all(const std::byte* start, std::size_t nbytes, int value) {
    return std::all_of(start, start + nbytes, [&](std::byte one) { return one == std::byte(value); });
}

bool eventually(const std::function<bool()>& condition) {
    const std::int64_t deadline = core::now_ns() + very_long;
    while (!condition()) {
        if (core::now_ns() > deadline) {
            return false;
        }
        std::this_thread::yield();
    }
    return true;
}

bool Gate::pass() {
    return eventually([this] { return is_open_.load(); });
}

}  // namespace ferrodist::tests
