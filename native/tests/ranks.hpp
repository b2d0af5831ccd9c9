// SPDX-License-Identifier: MIT OR Apache-2.0
// Ranks as threads. They share one mapping of every arena: ThreadSanitizer goes by addresses.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include "shm/collectives.hpp"
#include "shm/group.hpp"
#include "shm/world.hpp"

namespace ferrodist::core {

std::ostream& operator<<(std::ostream& stream, StatusCode code);

}  // namespace ferrodist::core

namespace ferrodist::tests {

constexpr std::int64_t millisecond = 1'000'000;
constexpr std::int64_t second = 1000 * millisecond;
// More than anything takes here. A wait that ends so ends a test that would hang.
constexpr std::int64_t very_long = 30 * second;

// Counts what a wait tells it.
class CountingHook : public core::ProgressHook {
public:
    void let_go() override { ++num_let_go; }
    bool poll() override {
        ++num_polls;
        return true;
    }

    int num_let_go = 0, num_polls = 0;
};

// Does something at every look, which may end the wait.
class ActingHook : public core::ProgressHook {
public:
    explicit ActingHook(std::function<bool()> act) : act_(std::move(act)) {}
    bool poll() override { return act_(); }

private:
    std::function<bool()> act_;
};

// Blocks threads that want to pass until it is opened.
class Gate {
public:
    void open() { is_open_ = true; }
    bool pass();

private:
    std::atomic<bool> is_open_{false};
};

// Holds a rank up where its wait begins: it has published, and has not yet seen the others.
class HoldingHook : public core::ProgressHook {
public:
    Gate is_here, may_go;
    void let_go() override {
        is_here.open();
        may_go.pass();
    }
};

core::WaitOptions options_of(core::ProgressHook& hook, std::uint64_t sequence, std::int64_t timeout_ns = very_long,
                          core::Spins* spins = core::no_spins);

// A collective without data. Ranks that give different fingerprints disagree.
core::Status meet_all(shm::Group& group, std::uint64_t sequence, std::int64_t timeout_ns = very_long,
                     std::uint64_t fingerprint = 0);
core::Status meet_all(shm::Group& group, std::uint64_t sequence, core::ProgressHook& hook);

// Runs one function per rank, each in a thread of its own, and waits for all.
void run_threads(int count, const std::function<void(int)>& work);

// The cores that the calling thread may use; keeps it on some.
std::vector<int> allowed_cpus();
void stay_on(const std::vector<int>& cpus);

// The ranks of one host, with the group of all.
class Host {
public:
    explicit Host(int size, std::int64_t heartbeat_timeout_ns = very_long, std::size_t arena_nbytes = 64 << 20);
    ~Host();
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;

    int size() const { return static_cast<int>(ranks_.size()); }
    shm::Arena& arena(int rank) { return *at(rank).arena; }
    const std::shared_ptr<shm::World>& world(int rank) { return at(rank).world; }
    const std::shared_ptr<shm::Group>& group(int rank) { return at(rank).group; }
    // `work` gets the group of its rank.
    void run(const std::function<void(shm::Group&)>& work);
    // Lets a rank look dead to the others.
    void kill(int rank);
    // Ends this rank's group and world, as close() does; the process lives on.
    void close(int rank);

private:
    struct Rank {
        std::shared_ptr<shm::Arena> arena;
        std::shared_ptr<shm::World> world;
        std::shared_ptr<shm::Group> group;
        int lifeline = -1;
    };
    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    std::vector<Rank> ranks_;
};

// The group of all of a world.
std::shared_ptr<shm::Group> first_group(const std::shared_ptr<shm::World>& world);

bool is_all(const std::byte* start, std::size_t nbytes, int value);

// Waits for something another rank does, and tells whether it came.
bool eventually(const std::function<bool()>& condition);

}  // namespace ferrodist::tests
