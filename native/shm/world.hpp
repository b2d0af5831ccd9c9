// SPDX-License-Identifier: MIT OR Apache-2.0
// World: the processes of a host that share their arenas, seen from one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shm/arena.hpp"
#include "shm/layout.hpp"
#include "core/wait.hpp"

namespace ferrodist::shm {

// Another process, or this one: its arena as mapped here, and an fd that shows when it is gone.
struct Peer {
    std::byte* base = nullptr;
    std::size_t nbytes = 0;
    int hook = -1;
    std::shared_ptr<const Mapping> mapping;

    ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base); }
    // How long a thread of it has been held in one call, as of its last heartbeat.
    std::int64_t held_ns() const {
        return header().beat.held_ns.load(std::memory_order_relaxed);  // pairs with the heartbeat's store
    }
    // Memory in the peer's arena; null if it reaches beyond.
    std::byte* at(std::uint64_t offset, std::uint64_t size) const {
        return offset <= nbytes && size <= nbytes - offset ? base + offset : nullptr;
    }
};

// How long another process has shown no heartbeat.
class HeartbeatTimer {
public:
    // Tells whether a process has been silent for longer than `limit_ns`; `passed_ns` is the time
    // since the last look. Counts only time in which this process was awake itself: a whole job
    // may be stopped.
    bool is_too_long(const Peer& peer, std::int64_t limit_ns, std::int64_t passed_ns) {
        // Pairs with the heartbeat's fetch_add; orders nothing.
        const std::uint64_t beat = peer.header().beat.count.load(std::memory_order_relaxed);
        quiet_ns_ = beat == beat_ ? quiet_ns_ + std::min(passed_ns, 2 * longest_sleep_ns) : 0;
        beat_ = beat;
        if (quiet_ns_ <= limit_ns || peer.hook < 0) {
            return false;
        }
        quiet_ns_ = is_traced(peer.hook) ? 0 : quiet_ns_;  // a debugger that lets it go gives it all its time again
        return quiet_ns_ != 0;
    }

private:
    std::uint64_t beat_ = 0;
    std::int64_t quiet_ns_ = 0;
};

// The heartbeat: one native thread per process shows the others that it is alive. It beats every so often, starts
// with the first beat and ends with the last.
void start_beating(Beat& beat, std::int64_t interval_ns);
void stop_beating(Beat& beat);

// A fresh arena, to be shown to the others: its header is in place and, right behind it, zeroed room
// for the block of the first group if that is this process's to give.
std::shared_ptr<Arena> make_arena(std::size_t first_block_nbytes = 0, std::size_t nbytes = 0);
constexpr std::size_t first_block = (sizeof(ArenaHeader) + 4095) / 4096 * 4096;

class Progress;

class World : core::NonCopyable {
public:
    // `peers` in the order of world ranks, this process included. Takes the hook fds over.
    World(int rank, std::shared_ptr<Arena> arena, std::vector<Peer> peers, std::int64_t heartbeat_ns,
          std::int64_t heartbeat_timeout_ns);
    ~World();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(peers_.size()); }
    const Peer& peer(int world_rank) const { return peers_[static_cast<std::size_t>(world_rank)]; }
    Arena& arena() const { return *arena_; }
    const std::shared_ptr<Arena>& shared_arena() const { return arena_; }
    // Whether this is a forked child's copy of its parent's.
    bool is_of_ancestor() const { return birth_.is_of_ancestor(); }
    Spins& spins() { return spins_; }
    std::int64_t heartbeat_timeout_ns() const { return heartbeat_timeout_ns_; }

    // Tells whether a process is gone, without waiting.
    bool is_dead(int world_rank) const;

    // Shows what this process waits in; empty when it does not.
    void report(std::string_view text);

    Invitation* invite(std::uint64_t id, std::uint64_t block, const std::vector<int>& members);
    void withdraw(Invitation* invitation);
    const Invitation* find_invitation(int world_rank, std::uint64_t id) const;
    std::vector<std::vector<int>> invitations_of(int world_rank) const;

    // What this process has left of a group that it is out of: blocks others may still look at.
    struct Remains {
        std::vector<Word*> presences;  // of every member, in the group's block
        std::vector<int> members;      // their world ranks
        std::size_t mine;              // which of them is this process
        std::vector<std::size_t> blocks;
        bool has_group_block;  // whether one of the blocks is the group's own
    };
    void leave_behind(Remains remains);
    // Frees the remains that nobody needs any more.
    void sweep();

    // Who makes progress for the messages of this process.
    Progress& progress() const { return *progress_; }

    // What tests count.
    std::atomic<std::uint64_t> sent_nbytes{0}, received_nbytes{0};

private:
    bool is_needed(const Remains& remains) const;

    Birth birth_;
    int rank_;
    std::shared_ptr<Arena> arena_;
    std::vector<Peer> peers_;
    std::int64_t heartbeat_timeout_ns_;
    Spins spins_;
    std::mutex mutex_;
    std::vector<Remains> remains_;
    std::unique_ptr<Progress> progress_;
};

}  // namespace ferrodist::shm
