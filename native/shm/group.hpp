// SPDX-License-Identifier: MIT OR Apache-2.0
// Group: ranks that meet round by round, and what they find when they wait for each other.
//
// A *round*: a rank writes into its slot, publishes it (its epoch becomes the number of the round
// + 1), and waits until all others have published theirs; then it reads what they wrote. Everything
// of a round is read before the next one is published, so a rank that has seen all epochs of round n
// knows that nobody reads round n-1 any more. Two slots, used in turn, are therefore enough. Nobody is
// ever more than one round ahead.
//
// The staging area is a ring: every round takes the bytes behind those of the round before, and never
// touches these. Writing to a line that is in a reader's cache takes five times as long as writing to one
// that has left it, because the reader has to give it up first. A ring larger than a second-level cache
// comes back to a line only when it has left, however little is staged at a time.
//
// The first round of a call also carries what was called: that is how a difference is found.
//
// *Barring*: who gives a round up at its deadline must first bar those that have not come, by a compare-and-swap on
// their epoch; coming to the round is one too, so exactly one of both succeeds. What an epoch says of a round is final
// then: all who look at every rank find the same ones barred, whichever of them was first. A round from which one
// is barred is never complete, so nobody can have finished its call; the group error that names the barred ranks
// concerns all of them alike. If all have come, the round is complete and nobody may give it up.
// Once all have entered a call, a deadline ends it only if nothing has moved for a while.
// A deadline that nobody chose ends nothing at all while those that are missing are alive and not stuck: see Patience.
//
// *Fencing*: a rank that was lost without proof of its death may continue later. Before a survivor goes on without it, it
// bars that rank from the round in which its own call failed, and itself from the next one; ranks that are a round behind
// still find that it has come to theirs. A rank that is barred never uses what the survivor has shown. One that had come to the call may: it has to be killed, or the memory taken back.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shm/layout.hpp"
#include "core/wait.hpp"
#include "shm/world.hpp"

namespace ferrodist::shm {

// What a rank calls, and where its memory is: see Slot.
struct Called {
    std::uint32_t kind;
    std::uint64_t sequence, fingerprint, source, target;
};

class Group : core::NonCopyable {
public:
    // `block` is the group's block, in the arena of its first member; `own_block` is its offset
    // there if that is this process.
    Group(std::shared_ptr<World> world, std::vector<int> members, int rank, std::byte* block,
          std::optional<std::size_t> own_block, std::shared_ptr<Group> parent);
    ~Group();

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
    Status meet(const WaitOptions& options) {
        return publish() ? await_others(options) : barred(options.sequence);
    }
    // False if this rank was barred from the round.
    bool publish();
    // The same, with what is called.
    bool publish(const Called& called);
    // How a call ends for a rank that was barred: it has come too late, unless it was in the call before.
    Status barred(std::uint64_t sequence) const {
        return {have_all_entered(sequence) ? StatusCode::group_error : StatusCode::given_up};
    }
    // Bars all ranks that have not come to the round that this rank has published last; false if all have. Any
    // thread of this rank.
    bool bar_missing();
    // Ends this rank's part in the group, and keeps another rank out of what this one has shown; true if that rank has
    // entered the last call of this one, which is not finished, and was not seen to leave it. After a group error; any
    // thread of this rank.
    bool fence(int rank);
    // A call of this rank begins with the current round; it is over; it has failed, and this rank uses nothing of it.
    void begin_call() { first_round_.store(round_, std::memory_order_relaxed); }  // published by show_epoch
    void end_call() { first_round_.store(no_call, std::memory_order_relaxed); }  // nothing is shown any more
    void leave_call() { show_out_of(round_ + 1); }
    // This rank is in no call.
    void show_idle() { show_out_of(round_); }
    // After a call that failed others may still write to this block of the arena, until it is taken back.
    void note_shown(std::size_t target);
    void take_back_shown();
    // The deadline of the current call is over, says a thread that is not in it: late if a rank was barred, or if
    // nothing has moved for a while. Done if the call is to go on, also because of its patience.
    Status expire(const WaitOptions& options);
    // All ranks were seen in a round of this call.
    void note_all_entered(std::uint64_t sequence) { all_entered_ = sequence; }
    bool have_all_entered(std::uint64_t sequence) const { return all_entered_ == sequence; }
    // Lets waits whose deadline is over see that bytes still move, where no epoch tells.
    void note_move() {
        // Relaxed: only this rank writes it; pairs with the load in WaitPoll.
        Word& mine = words(rank_).num_moves;
        mine.store(mine.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    Status await_others(const WaitOptions& options);
    // Tells the others that this rank is about to begin a call, whose turn it is, and waits a moment for them; true if all
    // are about to begin it too, or have. Each must begin it then, soon, on whatever thread.
    bool await_ready(std::uint64_t sequence);
    void next_round() { ++round_; }
    // Whether a rank has not come to the current round, or not staged all it said it would.
    bool is_missing(int rank) const { return !has_come(rank) || !has_staged(rank, everything); }
    std::vector<int> missing() const;
    // Sequence and kind of the last call a rank has entered; zero if none.
    std::pair<std::uint64_t, std::uint32_t> last_call(int rank) const;
    // How long a rank has slept for another.
    std::uint64_t waited_ns(int rank, int for_rank) const;

    // Room for all that this rank stages in the current round, at most `stage_nbytes`.
    std::byte* make_stage(std::size_t nbytes);
    // What a rank has staged in a round; null if what it says of it cannot be right.
    const std::byte* stage(int rank, std::uint32_t round, std::size_t nbytes) const;
    // A rank may show its slot before it has staged anything, so that others copy out while it copies in.
    // Then it says so before, how far it is as often as it likes, and when it has done.
    void begin_staging();
    void show_staged(std::size_t nbytes);
    void end_staging();
    Status await_staged(int peer, std::size_t nbytes, const WaitOptions& options);
    std::size_t staged_nbytes(int rank) const;

    static constexpr std::uint64_t no_call = std::numeric_limits<std::uint64_t>::max();
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

    // The group error of this group, or an abort of one it was split off, if it concerns `sequence`.
    bool has_error(std::uint64_t sequence) const;
    // Tells whether a rank has left or died.
    bool is_gone(int rank) const;

    // -- how it ends ----------------------------------------------------------------------------

    // Sets the group error; false if there is one already. Bytes beyond the capacity are cut.
    bool set_error(std::uint64_t sequence, std::string_view bytes);
    std::optional<std::string> group_error(std::uint64_t sequence) const;

    void announce_closing();
    // Says that nothing more comes from this rank, and how it left.
    void leave(std::string_view leave_reason);
    bool has_left() const { return has_left(rank_); }
    bool has_left(int rank) const {
        // Pairs with the store in leave: what the rank published before is seen after this.
        return words(rank).presence.load(std::memory_order_acquire) >= Presence::left;
    }
    // How a rank left; none if it has not, or died without a word.
    std::optional<std::string> leave_reason_of(int rank) const;

    // Takes care of a block of this process's arena that others use.
    void keep_block(std::size_t offset) { blocks_.push_back(offset); }

    std::uint64_t num_rounds() const { return num_rounds_; }

private:
    class WaitPoll;

    bool has_come(int rank) const { return has_come(rank, round_); }
    // Who has come to a round may be barred from the next one of its slot already, by itself: see fence.
    bool has_come(int rank, std::uint32_t round) const {
        // Pairs with the store in publish: what the slot says was written before.
        const std::uint32_t epoch = slot(rank, round).epoch.load(std::memory_order_acquire);
        return epoch == round + 1 || epoch == round + 2 + 2;
    }
    bool show_epoch();
    bool has_staged(int rank, std::size_t nbytes) const { return staged_nbytes(rank) >= nbytes; }
    Word& staged(int rank) const { return words(rank).staged[round_ & 1]; }
    std::uint32_t published_round() const;
    // Bars a rank from a round, and all after it, unless it has come to it; tells whether it is barred.
    bool bar(int rank, std::uint32_t round);
    // Bars this rank from the round after its last one, which is returned.
    std::uint32_t bar_self();
    void show_out_of(std::uint32_t round);
    // A number that changes as long as anything moves in this group.
    std::uint64_t count_moves() const;
    // Whether nobody of those who are missing is stuck in another call.
    template <class IsMissing>
    bool may_still_come(const WaitOptions& options, const IsMissing& is_missing) const;
    void wake_everybody();
    Status await(int peer, std::size_t nbytes, const Word& word, const WaitOptions& options);

    std::shared_ptr<World> world_;
    std::vector<int> members_;
    int rank_;
    GroupLayout layout_;
    std::shared_ptr<Group> parent_;
    bool has_group_block_;
    std::vector<std::size_t> blocks_;
    std::uint32_t round_ = 0;
    std::uint64_t all_entered_ = no_call;  // the last call that all were seen in
    std::size_t ring_ = 0;      // offset of the staging area; 0: not yet
    std::size_t ring_end_ = 0;  // of what was staged last, in the ring
    Scratch scratch_;
    std::mutex end_mutex_;  // held by the thread that sets the group error, leaves, or lets a call of another expire
    std::uint64_t expiring_moves_ = 0;  // what had moved at `expiring_ns_`; see expire
    std::int64_t expiring_ns_ = 0;
    std::uint64_t num_rounds_ = 0;
    std::atomic<std::uint64_t> first_round_{no_call};  // of the call that this rank is in, or has failed in
    std::vector<std::size_t> shown_;                   // offsets; guarded by end_mutex_
};

}  // namespace ferrodist::shm
