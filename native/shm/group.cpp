// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/group.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

namespace ferrodist::shm {
namespace {

// A round has its place in one half of the ring: then there is room for the next one behind it or,
// whatever its size, in the other half.
constexpr std::size_t half_nbytes = Group::stage_nbytes * 3 / 2;
static_assert(half_nbytes % line == 0);

// Epochs of even rounds are odd, and those of odd ones even; what bars is neither: the number of the round + 2.
bool is_barred_epoch(std::uint32_t epoch, std::uint32_t round) { return epoch != 0 && epoch % 2 == round % 2; }
bool is_barred_from(std::uint32_t epoch, std::uint32_t round) {
    return is_barred_epoch(epoch, round) && static_cast<std::int32_t>(epoch - 2 - round) <= 0;
}

}  // namespace

Group::Group(std::shared_ptr<World> world, std::vector<int> members, int rank, std::byte* block,
             std::optional<std::size_t> own_block, std::shared_ptr<Group> parent)
    : world_(std::move(world)),
      members_(std::move(members)),
      rank_(rank),
      layout_(block, members_.size()),
      parent_(std::move(parent)),
      has_group_block_(own_block.has_value()) {
    if (own_block) {
        blocks_.push_back(*own_block);
    }
}

Group::~Group() {
    if (world_->is_of_ancestor()) {
        return;
    }
    leave("");
    World::Remains remains{{}, members_, static_cast<std::size_t>(rank_), blocks_, has_group_block_};
    for (int rank = 0; rank < size(); ++rank) {
        remains.presences.push_back(&words(rank).presence);
    }
    world_->leave_behind(std::move(remains));
}

// -- rounds ----------------------------------------------------------------------------------------

bool Group::publish() {
    world_->spins().show_cpu();
    return show_epoch();
}

bool Group::publish(const Called& called) {
    world_->spins().show_cpu();
    // Who waits for this rank reads the line all the time: it is written at one go, or it would move to the
    // reader and back in between.
    Slot& mine = slot(rank_);
    mine.kind = called.kind;
    mine.sequence = called.sequence;
    mine.fingerprint = called.fingerprint;
    mine.source = called.source;
    mine.target = called.target;
    return show_epoch();
}

bool Group::show_epoch() {
    Slot& mine = slot(rank_);
    std::uint32_t before = mine.epoch.load(std::memory_order_relaxed);  // all others only ever bar
    // Pairs with has_come, with bar_missing, and, being seq_cst, with the sleeper's look at the epoch in wait_until.
    // It costs what a seq_cst store does.
    if (is_barred_epoch(before, round_) || !mine.epoch.compare_exchange_strong(before, round_ + 1, std::memory_order_seq_cst)) {
        return false;
    }
    // Pairs with the sleeper's fetch_add in wait_until.
    if (words(rank_).sleepers.load(std::memory_order_seq_cst) != 0) {
        wake_all(mine.epoch);
    }
    return true;
}

std::uint32_t Group::published_round() const {
    // Relaxed: this rank's own; if its other thread goes on meanwhile, all have come to the round that is found.
    const std::uint32_t even = slot(rank_, 0).epoch.load(std::memory_order_relaxed);
    const std::uint32_t odd = slot(rank_, 1).epoch.load(std::memory_order_relaxed);
    return (static_cast<std::int32_t>(even - odd) > 0 ? even : odd) - 1;
}

bool Group::bar(int rank, std::uint32_t round) {
    Word& epoch = slot(rank, round).epoch;
    std::uint32_t found = epoch.load(std::memory_order_acquire);  // pairs with publish
    // Who has not come to the round has the epoch of two rounds before, or none yet.
    const bool is_missing = found == round - 1 || (found == 0 && round < 2);
    // Pairs with the compare-and-swap in publish: one of both succeeds.
    const bool is_barred = is_missing && epoch.compare_exchange_strong(found, round + 2, std::memory_order_seq_cst);
    return is_barred || is_barred_from(found, round);
}

bool Group::bar_missing() {
    for (const std::uint32_t parity : {0u, 1u}) {
        // Relaxed: this rank's own, and final.
        if (is_barred_epoch(slot(rank_, parity).epoch.load(std::memory_order_relaxed), parity)) {
            return true;
        }
    }
    const std::uint32_t round = published_round();
    bool finds_barred = false;
    for (int rank = 0; rank < size(); ++rank) {
        finds_barred |= bar(rank, round);
    }
    return finds_barred;
}

std::uint32_t Group::bar_self() {
    while (true) {
        for (const std::uint32_t parity : {0u, 1u}) {
            // Relaxed: this rank's own, and final.
            const std::uint32_t epoch = slot(rank_, parity).epoch.load(std::memory_order_relaxed);
            if (is_barred_epoch(epoch, parity)) {
                return epoch - 3;  // barred from this minus 2; the round before was the last
            }
        }
        bar(rank_, published_round() + 1);  // fails if another thread of this rank comes to it
    }
}

bool Group::fence(int rank) {
    const std::uint32_t last = bar_self();
    const bool has_come = !bar(rank, last);
    (void)slot(rank_, last).epoch.load(std::memory_order_acquire);  // pairs with show_epoch: for begin_call before it
    const std::uint64_t call = first_round_.load(std::memory_order_relaxed);
    const auto first = static_cast<std::uint32_t>(call);
    const bool has_shown = call != no_call && static_cast<std::int32_t>(last - first) >= 0;
    if (!has_shown || (last == first && !has_come)) {
        return false;
    }
    const std::uint64_t out_of = words(rank).out_of.load(std::memory_order_acquire);  // pairs with show_out_of
    return out_of == 0 || static_cast<std::int32_t>(static_cast<std::uint32_t>(out_of) - first) <= 0;
}

void Group::show_out_of(std::uint32_t round) {
    // Pairs with the load in fence: what this rank has written to the memory of others is before it.
    words(rank_).out_of.store(std::uint64_t{1} << 32 | round, std::memory_order_release);
}

void Group::note_shown(std::size_t target) {
    const std::lock_guard lock(end_mutex_);
    shown_.push_back(target);
}

void Group::take_back_shown() {
    const std::lock_guard lock(end_mutex_);
    for (const std::size_t target : shown_) {
        world_->arena().take_back(target);
    }
    shown_.clear();
}

template <class IsMissing>
bool Group::may_still_come(const WaitOptions& options, const IsMissing& is_missing) const {
    bool is_anybody_missing = false;
    for (int rank = 0; rank < size(); ++rank) {
        if (rank == rank_ || !is_missing(rank)) {
            continue;
        }
        if (peer(rank).held_ns() >= options.patience.stuck_ns) {
            return false;
        }
        is_anybody_missing = true;
    }
    return is_anybody_missing;
}

Status Group::expire(const WaitOptions& options) {
    const std::lock_guard lock(end_mutex_);
    const std::uint32_t round = published_round();
    if (options.is_patient() && may_still_come(options, [&](int rank) { return !has_come(rank, round); })) {
        return {};
    }
    if (bar_missing()) {
        return {StatusCode::late};
    }
    const std::int64_t now = now_ns();
    if (const std::uint64_t moves = count_moves(); moves != expiring_moves_ || expiring_ns_ == 0) {
        expiring_moves_ = moves;
        expiring_ns_ = now;
    }
    return {now - expiring_ns_ < stall_ns ? StatusCode::done : StatusCode::late};
}

std::uint64_t Group::count_moves() const {
    std::uint64_t moves = 0;
    for (int rank = 0; rank < size(); ++rank) {
        RankWords& theirs = words(rank);
        // Relaxed: that one of them has changed is all that counts. Pairs with publish, show_staged, note_move.
        for (const Word* word : {&slot(rank, 0).epoch, &slot(rank, 1).epoch, &theirs.staged[0], &theirs.staged[1],
                                 &theirs.num_moves}) {
            moves = moves * 31 + word->load(std::memory_order_relaxed);
        }
    }
    return moves;
}

// What a wait for a round, or for what `peer` stages in it, looks at, now and then.
class Group::WaitPoll {
public:
    WaitPoll(Group& group, int peer, std::size_t nbytes, const WaitOptions& options)
        : group_(group), peer_(peer), nbytes_(nbytes), options_(options) {}

    // Whether a rank has not done its part.
    bool is_missing(int rank) const {
        return !group_.has_come(rank) || (nbytes_ > 0 && rank == peer_ && !group_.has_staged(rank, nbytes_));
    }

    void begin() {
        started_ns_ = polled_ns_ = moved_ns_ = now_ns();
        options_.begin();
    }
    bool has_begun() const { return started_ns_ != 0; }

    // A rank that left long ago, or a group error, need not be slept for.
    Status check() const {
        if (group_.has_error(options_.sequence)) {
            return {StatusCode::group_error};
        }
        for (int rank = 0; rank < group_.size(); ++rank) {
            // Looked at again: it may have done its part before it went.
            if (is_missing(rank) && group_.has_left(rank) && is_missing(rank)) {
                return loss(rank);
            }
        }
        return {};
    }

    Status poll() {
        if (group_.has_error(options_.sequence)) {
            return {StatusCode::group_error};
        }
        const std::int64_t now = now_ns(), passed = now - polled_ns_;
        polled_ns_ = now;
        heartbeat_timers_.resize(group_.members_.size());
        for (int rank = 0; rank < group_.size(); ++rank) {
            if (const Status status = look_at(rank, passed); status.failed()) {
                return status;
            }
        }
        note_moves(now);
        if (const Status status = expire(now); status.failed()) {
            return status;
        }
        return {options_.hook->poll() ? StatusCode::done : StatusCode::interrupted};
    }

    std::int64_t waited_ns() const { return now_ns() - started_ns_; }

private:
    // A rank may have set a group error before it went: that says more.
    Status loss(int rank) const {
        return group_.has_error(options_.sequence) ? Status{StatusCode::group_error} : Status{StatusCode::lost, rank};
    }

    Status look_at(int rank, std::int64_t passed) {
        if (rank == group_.rank_ || !is_missing(rank)) {
            return {};
        }
        // Looked at again: it may have done its part before it went.
        if (group_.is_gone(rank) && is_missing(rank)) {
            return loss(rank);
        }
        HeartbeatTimer& heartbeat_timeout = heartbeat_timers_[static_cast<std::size_t>(rank)];
        const bool lacks_heartbeat = heartbeat_timeout.is_too_long(group_.peer(rank), group_.world_->heartbeat_timeout_ns(), passed);
        return {lacks_heartbeat ? StatusCode::no_heartbeat : StatusCode::done, rank};
    }

    // Whether anything has moved in this group since the last look.
    void note_moves(std::int64_t now) {
        if (const std::uint64_t moves = group_.count_moves(); moves != moves_) {
            moves_ = moves;
            moved_ns_ = now;
        }
    }

    // At the deadline: ends the wait if a rank can be barred, but not while bytes move in a call that all are in.
    Status expire(std::int64_t now) {
        const bool all_entered = group_.have_all_entered(options_.sequence);
        if (!options_.is_late() || (all_entered && now - moved_ns_ < stall_ns)) {
            return {};
        }
        if (options_.is_patient() && group_.may_still_come(options_, [&](int rank) { return is_missing(rank); })) {
            return {};
        }
        if (group_.bar_missing()) {
            return {StatusCode::late};
        }
        return {all_entered && is_missing(peer_) ? StatusCode::late : StatusCode::done, peer_};
    }

    Group& group_;
    const int peer_;
    const std::size_t nbytes_;
    const WaitOptions& options_;
    std::int64_t started_ns_ = 0, polled_ns_ = 0;
    std::int64_t moved_ns_ = 0;  // when something was last seen to move
    std::uint64_t moves_ = 0;
    std::vector<HeartbeatTimer> heartbeat_timers_;
};

// Waits until a rank has come and staged so much; `word` is what it is going to change.
Status Group::await(int peer, std::size_t nbytes, const Word& word, const WaitOptions& options) {
    WaitPoll wait_poll(*this, peer, nbytes, options);
    const Status status = wait_until(
        word, words(peer).sleepers, options, [&] { return !wait_poll.is_missing(peer); }, wait_poll);
    if (wait_poll.has_begun() && !status.failed()) {
        // Relaxed: only this rank writes it, and statistics read it whenever.
        layout_.waited(static_cast<std::size_t>(rank_), static_cast<std::size_t>(peer))
            .fetch_add(static_cast<std::uint64_t>(wait_poll.waited_ns()), std::memory_order_relaxed);
    }
    return status;
}

Status Group::await_others(const WaitOptions& options) {
    ++num_rounds_;
    for (int step = 1; step < size(); ++step) {
        const int peer = (rank_ + step) % size();
        if (has_come(peer)) {
            continue;
        }
        if (const Status status = await(peer, 0, slot(peer).epoch, options); status.failed()) {
            return status;
        }
    }
    return {};
}

bool Group::await_ready(std::uint64_t sequence) {
    const auto number = static_cast<std::uint32_t>(sequence);
    words(rank_).ready_for.store(number, std::memory_order_relaxed);  // a hint; pairs with the load below
    const std::int64_t start = now_ns();
    for (int step = 1; step < size(); ++step) {
        const int peer = (rank_ + step) % size();
        while (words(peer).ready_for.load(std::memory_order_relaxed) != number && !has_come(peer)) {
            switch (spins()->next(start, now_ns())) {
                case Spins::Step::spin:
                    pause();
                    break;
                case Spins::Step::yield:
                    spins()->yield();
                    break;
                case Spins::Step::sleep:
                    spins()->waited(2 * Spins::longest_ns);  // or longer: not worth as much the next time
                    return false;
            }
        }
    }
    return true;
}

std::vector<int> Group::missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
        if (is_missing(rank)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

std::pair<std::uint64_t, std::uint32_t> Group::last_call(int rank) const {
    const Slot &even = slot(rank, 0), &odd = slot(rank, 1), &later = even.sequence > odd.sequence ? even : odd;
    return {later.sequence, later.kind};
}

std::uint64_t Group::waited_ns(int rank, int for_rank) const {
    // Relaxed: a count that its rank adds to.
    return layout_.waited(static_cast<std::size_t>(rank), static_cast<std::size_t>(for_rank))
        .load(std::memory_order_relaxed);
}

std::byte* Group::make_stage(std::size_t nbytes) {
    if (ring_ == 0) {
        ring_ = world_->arena().allocate(2 * half_nbytes);
        keep_block(ring_);
    }
    const std::size_t rest = half_nbytes - ring_end_ % half_nbytes;
    const std::size_t start = (nbytes <= rest ? ring_end_ : ring_end_ + rest) % (2 * half_nbytes);
    ring_end_ = start + (nbytes + line - 1) / line * line;
    slot(rank_).stage = ring_ + start;
    return world_->arena().base() + ring_ + start;
}

const std::byte* Group::stage(int rank, std::uint32_t round, std::size_t nbytes) const {
    const std::uint64_t offset = slot(rank, round).stage;
    return offset == 0 ? nullptr : peer(rank).at(offset, nbytes);
}

void Group::begin_staging() {
    // Relaxed: read by others only after the epoch that is published later. Nobody reads what it was:
    // that was two rounds ago.
    staged(rank_).store(1, std::memory_order_relaxed);
}

void Group::show_staged(std::size_t nbytes) {
    // Pairs with staged_nbytes. Sleepers are woken at the end only: who sleeps has waited for so long that
    // it need not hurry, and asking for sleepers every time would hold up the copying.
    staged(rank_).store(static_cast<std::uint32_t>(1 + nbytes), std::memory_order_release);
}

void Group::end_staging() {
    // Pairs with staged_nbytes, and, being seq_cst, with the sleeper's look at the word in wait_until.
    staged(rank_).store(0, std::memory_order_seq_cst);
    // Pairs with the sleeper's fetch_add in wait_until.
    if (words(rank_).sleepers.load(std::memory_order_seq_cst) != 0) {
        wake_all(staged(rank_));
    }
}

std::size_t Group::staged_nbytes(int rank) const {
    // Pairs with show_staged and end_staging: so much has been written before.
    const std::uint32_t found = staged(rank).load(std::memory_order_acquire);
    return found == 0 ? everything : found - 1;
}

Status Group::await_staged(int peer, std::size_t nbytes, const WaitOptions& options) {
    return has_staged(peer, nbytes) ? Status{} : await(peer, nbytes, staged(peer), options);
}

// -- what every wait looks at ----------------------------------------------------------------------

bool Group::has_error(std::uint64_t sequence) const {
    const GroupErrorBlock& block = layout_.header().group_error;
    // Pairs with the store in set_error.
    if (block.ready.load(std::memory_order_acquire) != 0 && block.sequence <= sequence) {
        return true;
    }
    return parent_ != nullptr && parent_->has_error(0);
}

bool Group::is_gone(int rank) const {
    return has_left(rank) || world_->is_dead(world_rank(rank));
}

// -- how it ends -----------------------------------------------------------------------------------

bool Group::set_error(std::uint64_t sequence, std::string_view bytes) {
    const std::lock_guard lock(end_mutex_);  // between the threads of this process
    GroupErrorBlock& block = layout_.header().group_error;
    const std::uint32_t me = static_cast<std::uint32_t>(rank_) + 1;
    std::uint32_t writer = 0;
    const std::int64_t limit = now_ns() + 1'000'000'000;  // its writer may be stopped in the middle
    // Relaxed: the claim guards nothing but itself; `ready` is what readers go by.
    while (!block.claim.compare_exchange_strong(writer, me, std::memory_order_relaxed)) {
        const bool is_rank = writer <= members_.size();
        const bool is_abandoned = writer == me || !is_rank || is_gone(static_cast<int>(writer) - 1);
        // Looked at after that: who has gone may have written before. Pairs with the release below.
        if (block.ready.load(std::memory_order_acquire) != 0 || now_ns() > limit) {
            return false;
        }
        if (!is_abandoned) {
            std::this_thread::yield();
            writer = 0;
        }  // else: its writer died in the middle, take it over
    }
    block.sequence = sequence;
    block.nbytes = std::min(bytes.size(), GroupErrorBlock::capacity);
    std::memcpy(block.bytes, bytes.data(), block.nbytes);
    block.ready.store(1, std::memory_order_seq_cst);  // pairs with has_error and group_error
    wake_everybody();
    return true;
}

std::optional<std::string> Group::group_error(std::uint64_t sequence) const {
    const GroupErrorBlock& block = layout_.header().group_error;
    // Pairs with the store in set_error.
    if (block.ready.load(std::memory_order_acquire) != 0 && block.sequence <= sequence) {
        return std::string(reinterpret_cast<const char*>(block.bytes),
                           std::min<std::size_t>(block.nbytes, GroupErrorBlock::capacity));
    }
    return parent_ == nullptr ? std::nullopt : parent_->group_error(0);
}

// Lets every wait in this group look round.
void Group::wake_everybody() {
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
        wake_all(layout_.slot(rank, 0).epoch);
        wake_all(layout_.slot(rank, 1).epoch);
        wake_all(layout_.words(rank).staged[0]);
        wake_all(layout_.words(rank).staged[1]);
        peer(static_cast<int>(rank)).header().doorbell.ring();
    }
}

void Group::announce_closing() {
    std::uint32_t inside = Presence::inside;
    words(rank_).has_closed.store(1, std::memory_order_release);  // pairs with Messages::has_closed
    // Pairs with the looks of Messages: who sees it sees what this rank has sent before.
    words(rank_).presence.compare_exchange_strong(inside, Presence::closing, std::memory_order_seq_cst);
    wake_everybody();
}

void Group::leave(std::string_view leave_reason) {
    if (world_->is_of_ancestor()) {  // a forked child drops what is its parent's
        return;
    }
    const std::lock_guard lock(end_mutex_);
    if (has_left()) {
        return;
    }
    RankWords& mine = words(rank_);
    mine.leave_reason_nbytes =
        static_cast<std::uint32_t>(std::min(leave_reason.size(), RankWords::leave_reason_capacity));
    std::memcpy(mine.leave_reason, leave_reason.data(), mine.leave_reason_nbytes);
    mine.presence.store(Presence::left, std::memory_order_release);  // pairs with is_gone
    wake_everybody();
}

std::optional<std::string> Group::leave_reason_of(int rank) const {
    const RankWords& theirs = words(rank);
    // Pairs with the release in leave.
    if (theirs.presence.load(std::memory_order_acquire) < Presence::left) {
        return std::nullopt;
    }
    const std::size_t nbytes = std::min<std::size_t>(theirs.leave_reason_nbytes, RankWords::leave_reason_capacity);
    return std::string(reinterpret_cast<const char*>(theirs.leave_reason), nbytes);
}

}  // namespace ferrodist::shm
