// SPDX-License-Identifier: MIT OR Apache-2.0
// Group: ranks that meet round by round, and what they find when they wait for each other.
//
// A *round*: a rank writes into its slot, publishes it (its tick becomes the number of the round
// + 1), and waits until all others have published theirs; then it reads what they wrote. Everything
// of a round is read before the next one is published, so a rank that has seen all ticks of round n
// knows that nobody reads round n-1 any more. Two slots, used in turn, are therefore enough. Nobody is
// ever more than one round ahead.
//
// The staging area is a ring: every round takes the bytes behind those of the round before, and never
// touches these. Writing to a line that is in a reader's cache takes five times as long as writing to one
// that has left it, because the reader has to give it up first. A ring larger than a second-level cache
// comes back to a line only when it has left, however little is staged at a time.
//
// The first round of a call also carries what was called: that is how a difference is found.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shm/layout.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace ferrodist::shm {

// What a rank calls, and where its memory is: see Slot.
struct Called {
    std::uint32_t kind;
    std::uint64_t sequence, fingerprint, source, target;
};

class Group {
public:
    // `block` is the group's block, in the arena of its first member; `own_block` is its offset
    // there if that is this process.
    Group(std::shared_ptr<World> world, std::vector<int> members, int rank, std::byte* block,
          std::optional<std::size_t> own_block, std::shared_ptr<Group> parent);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(members_.size()); }
    const std::vector<int>& members() const { return members_; }
    World& world() const { return *world_; }
    const std::shared_ptr<World>& shared_world() const { return world_; }
    int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
    const Peer& peer(int rank) const { return world_->peer(world_rank(rank)); }
    const GroupLayout& layout() const { return layout_; }
    RankWords& words(int rank) const { return layout_.words(static_cast<std::size_t>(rank)); }
    Spins* spins() const { return &world_->spins(); }

    // -- rounds: one thread at a time -----------------------------------------------------------

    // The slot of a rank in the current round, or in another.
    Slot& slot(int rank) const { return slot(rank, round_); }
    Slot& slot(int rank, std::uint32_t round) const {
        return layout_.slot(static_cast<std::size_t>(rank), round & 1);
    }
    std::uint32_t round() const { return round_; }
    // Shows this rank's slot and waits for all others'; they stay readable until next_round().
    Ending meet(const Patience& patience) {
        publish();
        return await_others(patience);
    }
    void publish();
    // The same, with what is called.
    void publish(const Called& called);
    Ending await_others(const Patience& patience);
    void next_round() { ++round_; }
    // Whether a rank has not come to the current round, or not staged all it said it would.
    bool is_missing(int rank) const { return !has_come(rank) || !has_staged(rank, everything); }

    // Room for all that this rank stages in the current round, at most `stage_nbytes`.
    std::byte* make_stage(std::size_t nbytes);
    // What a rank has staged in a round; null if what it says of it cannot be right.
    const std::byte* stage(int rank, std::uint32_t round, std::size_t nbytes) const;
    // A rank may show its slot before it has staged anything, so that others copy out while it copies in.
    // Then it says so before, how far it is as often as it likes, and when it has done.
    void begin_staging();
    void show_staged(std::size_t nbytes);
    void end_staging();
    Ending await_staged(int peer, std::size_t nbytes, const Patience& patience);
    std::size_t staged_nbytes(int rank) const;

    static constexpr std::size_t everything = std::numeric_limits<std::size_t>::max();
    static constexpr std::size_t stage_nbytes = 1024 * 1024;
    static constexpr std::size_t piece_nbytes = 512 * 1024;  // staged at a time for one reader

    // Lists that every call fills again, kept so that none of them allocates.
    struct Scratch {
        std::vector<const std::byte*> sources;
        std::vector<std::byte*> targets;
        std::vector<const void*> operands;
        std::vector<std::byte*> places;
    };
    Scratch& scratch() { return scratch_; }

    // -- what every wait looks at ---------------------------------------------------------------

    // The verdict on this group, or an abort of one it was split off, if it concerns `sequence`.
    bool has_verdict(std::uint64_t sequence) const;
    // Tells whether a rank has left or died.
    bool is_gone(int rank) const;

    // -- how it ends ----------------------------------------------------------------------------

    // Gives the verdict; false if there is one already. Bytes beyond the capacity are cut.
    bool give_verdict(std::uint64_t sequence, std::string_view bytes);
    std::optional<std::string> verdict(std::uint64_t sequence) const;

    void announce_closing();
    // Says that nothing more comes from this rank, and how it left.
    void leave(std::string_view departure);
    bool has_left() const { return has_left(rank_); }
    bool has_left(int rank) const {
        // Pairs with the store in leave: what the rank published before is seen after this.
        return words(rank).presence.load(std::memory_order_acquire) >= Presence::left;
    }
    // How a rank left; none if it has not, or died without a word.
    std::optional<std::string> departure_of(int rank) const;

    // Takes care of a block of this process's arena that others use.
    void keep_block(std::size_t offset) { blocks_.push_back(offset); }

    std::uint64_t num_rounds() const { return num_rounds_; }

private:
    class Lookout;

    bool has_come(int rank) const {
        // Pairs with the store in publish: what the slot says was written before.
        return slot(rank).tick.load(std::memory_order_acquire) == round_ + 1;
    }
    void show_tick();
    bool has_staged(int rank, std::size_t nbytes) const { return staged_nbytes(rank) >= nbytes; }
    Word& staged(int rank) const { return words(rank).staged[round_ & 1]; }
    void wake_everybody();
    Ending await(int peer, std::size_t nbytes, const Word& word, const Patience& patience);

    std::shared_ptr<World> world_;
    std::vector<int> members_;
    int rank_;
    GroupLayout layout_;
    std::shared_ptr<Group> parent_;
    bool has_group_block_;
    std::vector<std::size_t> blocks_;
    std::uint32_t round_ = 0;
    std::size_t ring_ = 0;      // offset of the staging area; 0: not yet
    std::size_t ring_end_ = 0;  // of what was staged last, in the ring
    Scratch scratch_;
    std::mutex ending_;  // held by the thread that gives the verdict or leaves
    std::uint64_t num_rounds_ = 0;
};

}  // namespace ferrodist::shm
