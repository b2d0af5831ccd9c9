// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/world.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <stdexcept>
#include <thread>

#include "shm/progress.hpp"

namespace ferrodist::shm {

// -- the heartbeat ---------------------------------------------------------------------------------

namespace {

class Heart {
public:
    const core::Birth birth;

    void add(Beat& beat, std::int64_t interval_ns) {
        const std::lock_guard lock(mutex_);
        beats_.push_back({&beat, std::chrono::nanoseconds(interval_ns)});
        if (!thread_.joinable()) {
            is_ending_ = std::make_shared<bool>(false);
            thread_ = core::start_thread([this, is_ending = is_ending_] { run(*is_ending); });
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

}  // namespace

void start_beating(Beat& beat, std::int64_t interval_ns) { core::of_process<Heart>().add(beat, interval_ns); }

void stop_beating(Beat& beat) { core::of_process<Heart>().remove(beat); }

// -- the world -------------------------------------------------------------------------------------

std::shared_ptr<Arena> make_arena(std::size_t first_block_nbytes, std::size_t nbytes) {
    auto arena = std::make_shared<Arena>(sizeof(ArenaHeader), nbytes);
    if (first_block_nbytes > 0) {
        arena->allocate(first_block_nbytes);  // the lowest gap: begins at first_block
    }
    new (arena->base()) ArenaHeader{};
    return arena;
}

namespace {

std::vector<Word*> cpus_of(const std::vector<Peer>& peers) {
    std::vector<Word*> cpus;
    for (const Peer& peer : peers) {
        if (peer.nbytes < sizeof(ArenaHeader)) {
            throw std::runtime_error("an arena is too small to be one");
        }
        cpus.push_back(&peer.header().cpu);
    }
    return cpus;
}

}  // namespace

World::World(int rank, std::shared_ptr<Arena> arena, std::vector<Peer> peers,
             std::int64_t heartbeat_ns, std::int64_t heartbeat_timeout_ns)
    : rank_(rank), arena_(std::move(arena)), peers_(std::move(peers)), heartbeat_timeout_ns_(heartbeat_timeout_ns),
      spins_(cpus_of(peers_), rank) {
    progress_ = std::make_unique<Progress>(*this);
    if (peers_.size() > 1) {
        start_beating(peer(rank_).header().beat, heartbeat_ns);
    }
}

World::~World() {
    progress_.reset();
    if (peers_.size() > 1 && !is_of_ancestor()) {
        stop_beating(peer(rank_).header().beat);
    }
    for (const Remains& one : remains_) {
        if (!is_of_ancestor()) {
            // Pairs with the acquire in is_needed: this process never looks at the block again.
            one.presences[one.mine]->store(Presence::swept, std::memory_order_release);
        }
    }
    for (const Peer& peer : peers_) {
        if (peer.hook >= 0) {
            close(peer.hook);
        }
    }
}

bool World::is_dead(int world_rank) const {
    pollfd watched{peer(world_rank).hook, POLLIN, 0};
    return watched.fd >= 0 && poll(&watched, 1, 0) == 1;
}

void World::report(std::string_view text) {
    const std::lock_guard lock(mutex_);
    peer(rank_).header().report.write(text);
}

Invitation* World::invite(std::uint64_t id, std::uint64_t block, const std::vector<int>& members) {
    const std::size_t list = arena_->allocate(members.size() * sizeof(std::uint32_t));
    auto* ranks = reinterpret_cast<std::uint32_t*>(arena_->base() + list);
    std::copy(members.begin(), members.end(), ranks);
    const std::lock_guard lock(mutex_);
    ArenaHeader& header = peer(rank_).header();
    for (Invitation& entry : header.invitations) {
        if (entry.id.load(std::memory_order_relaxed) == 0) {
            entry.block.store(block, std::memory_order_relaxed);
            entry.members.store(list, std::memory_order_relaxed);
            entry.num_members.store(members.size(), std::memory_order_relaxed);
            entry.is_joining.store(0, std::memory_order_relaxed);
            // Pairs with the acquire in find_invitation and invitations_of.
            entry.id.store(id, std::memory_order_release);
            // Pairs with the look at invitations_changed before a member sleeps.
            header.invitations_changed.fetch_add(1, std::memory_order_seq_cst);
            wake_all(header.invitations_changed);
            return &entry;
        }
    }
    arena_->free(list);
    throw std::runtime_error("too many groups are being split off at once");
}

void World::withdraw(Invitation* invitation) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t list = invitation->members.load(std::memory_order_relaxed);
    // Pairs with find_invitation; seq_cst for the look at is_joining in ~Split.
    invitation->id.store(0, std::memory_order_seq_cst);
    arena_->free(list);
}

const Invitation* World::find_invitation(int world_rank, std::uint64_t id) const {
    for (const Invitation& entry : peer(world_rank).header().invitations) {
        // Pairs with the release in invite; seq_cst for is_joining, see ~Split.
        if (entry.id.load(std::memory_order_seq_cst) == id) {
            return &entry;
        }
    }
    return nullptr;
}

std::vector<std::vector<int>> World::invitations_of(int world_rank) const {
    std::vector<std::vector<int>> found;
    const Peer& owner = peer(world_rank);
    for (const Invitation& entry : owner.header().invitations) {
        if (entry.id.load(std::memory_order_acquire) == 0) {  // pairs with the release in invite
            continue;
        }
        const std::uint64_t count = entry.num_members.load(std::memory_order_relaxed);
        const std::byte* list = owner.at(entry.members.load(std::memory_order_relaxed),
                                         count <= peers_.size() ? count * sizeof(std::uint32_t) : ~0ull);
        if (list != nullptr) {
            const auto* ranks = reinterpret_cast<const std::uint32_t*>(list);
            found.emplace_back(ranks, ranks + count);
        }
    }
    return found;
}

void World::leave_behind(Remains remains) {
    {
        const std::lock_guard lock(mutex_);
        remains_.push_back(std::move(remains));
    }
    sweep();
}

// The group's own block must outlast every look at it, other blocks only every use of them.
bool World::is_needed(const Remains& remains) const {
    const std::uint32_t enough = remains.has_group_block ? Presence::swept : Presence::left;
    for (std::size_t rank = 0; rank < remains.presences.size(); ++rank) {
        // Pairs with the releases in Group::leave and sweep: who has left touches nothing more.
        const bool is_out = remains.presences[rank]->load(std::memory_order_acquire) >= enough;
        if (rank != remains.mine && !is_out && !is_dead(remains.members[rank])) {
            return true;
        }
    }
    return false;
}

void World::sweep() {
    const std::lock_guard lock(mutex_);
    std::erase_if(remains_, [this](const Remains& one) {
        if (is_needed(one)) {
            return false;
        }
        // Pairs with the acquire in is_needed, of the rank that has the group's block.
        one.presences[one.mine]->store(Presence::swept, std::memory_order_release);
        for (const std::size_t block : one.blocks) {
            arena_->free(block);
        }
        return true;
    });
}

}  // namespace ferrodist::shm
