// SPDX-License-Identifier: MIT OR Apache-2.0
// Words used below: a *block* is what one rank has or gets; a *chunk* is the part of an array that
// one rank reduces; a *piece* is what a rank stages in one round for one reader. Memory in an arena is
// *shared*: the others read and write it in place. All other memory is staged, piece by piece.
#include "shm/collectives.hpp"

#include <algorithm>
#include <vector>

#include "core/memory.hpp"

namespace ferrodist::shm {
namespace {

using Bytes = std::size_t;

// Up to this size everybody reduces everything: one round instead of two.
constexpr Bytes largest_flat = Slot::capacity;
// Reduced at a time where the result goes to several places: still in the first-level cache then.
constexpr Bytes hot_nbytes = 8 * 1024;
// Staged at a time where others follow: copying it takes longer than telling them, and not much longer.
constexpr Bytes message_nbytes = 16 * 1024;
// Copied or reduced between two notes that something moves: a few milliseconds at the slowest.
constexpr Bytes move_nbytes = 4 * 1024 * 1024;
constexpr Bytes everything = Group::everything;

constexpr Bytes round_up(Bytes nbytes, Bytes unit) { return (nbytes + unit - 1) / unit * unit; }

struct Part {
    Bytes start, nbytes;
};

// Part `index` when `nbytes` are cut into parts of `size`, of which the last may be short or empty.
constexpr Part cut(Bytes nbytes, Bytes size, Bytes index) {
    const Bytes start = index == 0 ? 0 : std::min(nbytes, size * index);
    return {start, std::min(size, nbytes - start)};
}

constexpr Bytes count_cuts(Bytes nbytes, Bytes size) {
    return nbytes / size + (nbytes % size != 0 || nbytes == 0 ? 1 : 0);
}

// One collective in progress.
class Run {
public:
    Run(Group& group, const Task& task, const WaitOptions& options)
        : group_(group), task_(task), options_(options), world_(static_cast<Bytes>(group.size())),
          me_(static_cast<Bytes>(group.rank())), root_(static_cast<Bytes>(task.root)),
          sources_(group.scratch().sources), targets_(group.scratch().targets),
          operands_(group.scratch().operands), places_(group.scratch().places) {
        sources_.clear();
        targets_.clear();
    }

    Status go() {
        switch (task_.kind) {
            case Kind::allreduce: return task_.nbytes <= largest_flat ? allreduce_flat() : allreduce_by_chunks();
            case Kind::reduce: return reduce_first(me_ == root_ ? world_ : 0, root_);
            case Kind::reduce_scatter: return reduce_scatter();
            case Kind::broadcast: return broadcast();
            case Kind::all_gather: return gather(true);
            case Kind::gather: return gather(me_ == root_);
            case Kind::scatter: return scatter();
            case Kind::all_to_all: return all_to_all();
            case Kind::barrier: return rounds([](Bytes) {}, [] { return Bytes{1}; }, [](Bytes) {});
            case Kind::scan: return reduce_first(me_ + 1, world_ - 1);
            case Kind::exscan: return reduce_first(me_, world_ - 1);
        }
        return {StatusCode::corrupt, group_.rank()};
    }

    // After a call that failed others may still be reading and writing what was shown to them.
    void keep_shown() {
        for (const std::uint64_t posted : {posted_source_, posted_target_}) {
            if (posted != 0) {
                group_.world().arena().pin(posted - 1);
            }
        }
        if (posted_target_ != 0) {
            group_.note_shown(posted_target_ - 1);
        }
    }

    Bytes sent = 0, received = 0;

private:
    // -- the rounds -----------------------------------------------------------------------------

    // `stage(k)` shows piece k, `count()` tells how many rounds there are, once it is known whose
    // memory is shared, and `consume(k)` uses what the others have staged as piece k.
    //
    // Where a rank either stages or reads, a piece is cut into messages, and readers follow the writer
    // through it: they copy out while it copies in. Where ranks have to copy both ways, all of them are
    // busy all the time, and following makes it only worse: a line that has just been written is slow to get.
    template <class Stage, class Count, class Consume>
    Status rounds(Stage stage, Count count, Consume consume) {
        find_shown();
        if (const Status status = meet(stage, 0); status.failed()) {
            return status;
        }
        group_.note_all_entered(options_.sequence);
        if (const Status status = compare(); status.failed()) {
            return status;
        }
        const Bytes last = count();
        for (Bytes k = 0; k < last; ++k) {
            if (k > 0) {
                group_.next_round();
                room_ = nullptr;
                if (const Status status = meet(stage, k); status.failed()) {
                    return status;
                }
            }
            consume(k);
            if (trouble_.failed()) {
                return trouble_;
            }
        }
        group_.next_round();
        return num_shared_ > 0 ? part() : Status{};
    }

    // One round: shows piece k and waits until everybody has come.
    template <class Stage>
    Status meet(Stage stage, Bytes k) {
        if (!is_followed_ || !is_staged_) {
            stage(k);
            return publish(k) ? group_.await_others(options_) : group_.barred(options_.sequence);
        }
        room();  // where it is has to be in the slot
        group_.begin_staging();
        const bool has_come = publish(k);
        if (has_come) {
            stage(k);
        }
        group_.end_staging();
        return has_come ? group_.await_others(options_) : group_.barred(options_.sequence);
    }

    // Finds where this rank's memory is if others can reach it.
    void find_shown() {
        posted_source_ = shows_source_ ? offset_of(task_.source, source_nbytes(me_)) : 0;
        posted_target_ = shows_target_ ? offset_of(task_.target, target_nbytes(me_)) : 0;
        is_staged_ = posted_source_ == 0 && task_.source != nullptr && is_read();
    }

    // Shows the slot, in the first round with what is called; false if this rank was barred from the round.
    bool publish(Bytes k) {
        if (k > 0) {
            return group_.publish();
        }
        return group_.publish({static_cast<std::uint32_t>(task_.kind), options_.sequence, task_.fingerprint, posted_source_,
                        posted_target_});
    }

    // Whether others read this rank's input.
    bool is_read() const {
        switch (task_.kind) {
            case Kind::broadcast:
            case Kind::scatter: return world_ > 1 && me_ == root_;
            case Kind::reduce:
            case Kind::gather: return me_ != root_;
            case Kind::scan:
            case Kind::exscan: return me_ + 1 < world_;
            default: return world_ > 1;
        }
    }

    std::uint64_t offset_of(const std::byte* memory, Bytes nbytes) const {
        if (memory == nullptr || nbytes <= Slot::capacity) {
            return 0;
        }
        const auto offset = group_.world().arena().find(memory, nbytes);
        return offset ? *offset + 1 : 0;
    }

    // When everybody has posted: compares, and finds the shared memory.
    Status compare() {
        bool finds_shared = false;
        for (int rank = 0; rank < group_.size(); ++rank) {
            const Slot& theirs = group_.slot(rank);
            if (theirs.fingerprint != task_.fingerprint || theirs.sequence != options_.sequence) {
                group_.next_round();
                return {StatusCode::mismatch, rank};
            }
            finds_shared |= (theirs.source | theirs.target) != 0;
        }
        return finds_shared ? find_shared() : Status{};
    }

    Status find_shared() {
        sources_.assign(world_, nullptr);
        targets_.assign(world_, nullptr);
        for (Bytes rank = 0; rank < world_; ++rank) {
            const Slot& theirs = group_.slot(static_cast<int>(rank));
            if (!resolve(rank, theirs.source, source_nbytes(rank), sources_[rank]) ||
                !resolve(rank, theirs.target, target_nbytes(rank), targets_[rank])) {
                return {StatusCode::corrupt, static_cast<int>(rank)};
            }
        }
        return {};
    }

    template <class Address>
    bool resolve(Bytes rank, std::uint64_t posted, Bytes nbytes, Address& address) {
        if (posted != 0) {
            address = group_.peer(static_cast<int>(rank)).at(posted - 1, nbytes);
            ++num_shared_;
            return address != nullptr;
        }
        return true;
    }

    // Shared memory is its owner's again only when nobody uses it any more.
    Status part() {
        const Status status = group_.meet(options_);
        group_.next_round();
        return status;
    }

    // -- sizes and places -----------------------------------------------------------------------

    // Blocks are as long as the ranks have told each other, or all alike.
    Bytes block(Bytes index) const { return task_.blocks == nullptr ? task_.nbytes : task_.blocks[index]; }
    Bytes block_start(Bytes index) const {
        return task_.blocks == nullptr ? index * task_.nbytes : sum(index, [&](Bytes i) { return task_.blocks[i]; });
    }
    Bytes largest_block(Bytes num_blocks) const {
        return task_.blocks == nullptr ? task_.nbytes : *std::max_element(task_.blocks, task_.blocks + num_blocks);
    }
    Bytes largest_block() const { return largest_block(world_); }
    // all_to_all: what one rank sends to another, and where it stands.
    Bytes pair(Bytes from, Bytes to) const {
        return task_.blocks == nullptr ? task_.nbytes : task_.blocks[from * world_ + to];
    }
    Bytes start_in_source(Bytes from, Bytes to) const {
        return sum(to, [&](Bytes i) { return pair(from, i); });
    }
    Bytes start_in_target(Bytes from, Bytes to) const {
        return sum(from, [&](Bytes i) { return pair(i, to); });
    }
    template <class Size>
    static Bytes sum(Bytes count, const Size& size_of) {
        Bytes total = 0;
        for (Bytes i = 0; i < count; ++i) {
            total += size_of(i);
        }
        return total;
    }

    Bytes source_nbytes(Bytes rank) const {
        switch (task_.kind) {
            case Kind::all_gather:
            case Kind::gather: return block(rank);
            case Kind::scatter: return rank == root_ ? block_start(world_) : 0;
            case Kind::reduce_scatter: return block_start(world_);
            case Kind::all_to_all: return start_in_source(rank, world_);
            default: return task_.nbytes;
        }
    }
    Bytes target_nbytes(Bytes rank) const {
        switch (task_.kind) {
            case Kind::all_gather:
            case Kind::gather: return block_start(world_);
            case Kind::scatter:
            case Kind::reduce_scatter: return block(rank);
            case Kind::all_to_all: return start_in_target(world_, rank);
            default: return task_.nbytes;
        }
    }

    // The input of a rank if it can be read in place.
    const std::byte* shared_source(Bytes rank) const {
        return rank == me_ ? task_.source : sources_.empty() ? nullptr : sources_[rank];
    }
    std::byte* shared_target(Bytes rank) const { return targets_.empty() ? nullptr : targets_[rank]; }

    // Whether every rank's input is shared: then nothing goes through the stage.
    bool all_sources_shared() const { return !sources_.empty() && !std::ranges::count(sources_, nullptr); }

    // Where this rank shows its pieces of the current round, and where others show theirs.
    std::byte* room() {
        if (room_ == nullptr) {
            room_ = is_small_ ? group_.slot(group_.rank()).data : group_.make_stage(room_nbytes_);
        }
        return room_;
    }
    const std::byte* shown(Bytes rank) { return shown(rank, group_.round()); }
    const std::byte* shown(Bytes rank, std::uint32_t round) {
        const int number = static_cast<int>(rank);
        if (is_small_) {
            return group_.slot(number).data;
        }
        if (const std::byte* const found = group_.stage(number, round, room_nbytes_)) {
            return found;
        }
        trouble_ = {StatusCode::corrupt, number};  // the call is going to fail; until then any memory will do
        return room();
    }
    // A rank that stages a piece for every other rank leaves itself out.
    static Bytes place_for(Bytes reader, Bytes writer) { return reader - (reader > writer ? 1 : 0); }

    void show(std::byte* into, const std::byte* from, Bytes nbytes) {
        is_followed_ ? show_messages(into, from, nbytes) : copy_bytes(into, from, nbytes);
        sent += nbytes;
    }
    void show_messages(std::byte* into, const std::byte* from, Bytes nbytes) {
        for (Bytes done = 0; done < nbytes; done += message_nbytes) {
            const Bytes now = std::min(message_nbytes, nbytes - done);
            copy_bytes(into + done, from + done, now);
            group_.show_staged(static_cast<Bytes>(into - room_) + done + now);
        }
    }
    void fetch(std::byte* into, const std::byte* from, Bytes nbytes) {
        copy_moving(into, from, nbytes);
        received += nbytes;
    }
    // Copies shared memory of any size, and lets the others see that it moves.
    void copy_moving(std::byte* into, const std::byte* from, Bytes nbytes) {
        for (; nbytes > move_nbytes; nbytes -= move_nbytes, into += move_nbytes, from += move_nbytes) {
            copy_bytes(into, from, move_nbytes);
            group_.note_move();
        }
        copy_bytes(into, from, nbytes);
    }
    // Fetches what a rank stages at `place`, as soon as it is there.
    void follow(Bytes rank, std::byte* into, Bytes place, Bytes nbytes) {
        const int writer = static_cast<int>(rank);
        const std::byte* const from = shown(rank) + place;
        for (Bytes done = 0; done < nbytes && !trouble_.failed();) {
            const Bytes least = std::min(nbytes, done + message_nbytes);
            trouble_ = group_.await_staged(writer, place + least, options_);
            if (!trouble_.failed()) {
                const Bytes until = std::clamp(group_.staged_nbytes(writer) - place, least, nbytes);
                fetch(into + done, from + done, until - done);
                done = until;
            }
        }
    }

    // How much of every block a rank stages in one round: once, or for every other rank a piece.
    Bytes piece_for(Bytes num_pieces, Bytes largest) {
        is_small_ = largest * num_pieces <= Slot::capacity;
        const Bytes most = std::min(Group::piece_nbytes, Group::stage_nbytes / std::max<Bytes>(num_pieces, 1));
        const Bytes piece = is_small_ ? std::max<Bytes>(largest, 1)
                                      : std::min(round_up(largest, line), most / line * line);
        room_nbytes_ = piece * num_pieces;
        return piece;
    }

    // -- reducing --------------------------------------------------------------------------------

    void reduce_into(std::byte* into, Bytes nbytes) const {
        local_reduce(task_.dtype, task_.op, into, operands_.data(), operands_.size(),
             nbytes / item_size(task_.dtype), world_);
    }

    // Reduces to the first place and copies to the others while the result is hot.
    void reduce_to_places(Bytes nbytes) {
        for (Bytes done = 0; done < nbytes; done += hot_nbytes) {
            const Bytes now = std::min(hot_nbytes, nbytes - done);
            reduce_into(places_[0] + done, now);
            for (Bytes i = 1; i < places_.size(); ++i) {
                copy_bytes(places_[i] + done, places_[0] + done, now);
            }
            for (const void*& operand : operands_) {
                operand = static_cast<const std::byte*>(operand) + now;
            }
            if (done > 0 && done % move_nbytes == 0) {
                group_.note_move();
            }
        }
    }

    // -- the collectives ------------------------------------------------------------------------

    // Stages piece k of the first bytes of the input, for all who read it.
    void show_piece(Bytes k, Bytes nbytes) {
        if (const Part part = cut(nbytes, piece_, k); is_staged_ && part.nbytes > 0) {
            show(room(), task_.source + part.start, part.nbytes);
        }
    }

    // Stages piece k of every other rank's block of the input, each for that rank.
    template <class Size>
    void show_pieces(Bytes k, const Size& size_for) {
        Bytes start = 0;
        for (Bytes rank = 0; is_staged_ && rank < world_; start += size_for(rank++)) {
            if (const Part part = cut(size_for(rank), piece_, k); rank != me_ && part.nbytes > 0) {
                show(room() + place_for(rank, me_) * piece_, task_.source + start + part.start, part.nbytes);
            }
        }
    }

    // Whether the input of a rank is shared.
    bool is_source_shared(Bytes rank) const { return !sources_.empty() && sources_[rank] != nullptr; }

    Status allreduce_flat() {
        is_small_ = true;
        return rounds(
            [&](Bytes) {
                if (is_staged_) {
                    show(room(), task_.source, task_.nbytes);
                }
            },
            [] { return Bytes{1}; },
            [&](Bytes) {
                operands_.clear();
                for (Bytes rank = 0; rank < world_; ++rank) {
                    operands_.push_back(rank == me_ ? task_.source : shown(rank));
                }
                reduce_into(task_.target, task_.nbytes);
                received += task_.nbytes * (world_ - 1);
            });
    }

    // Segment by segment, each cut into one chunk per rank. In stage k a rank reduces its chunk of
    // segment k-1 and shows the chunks of segment k that others reduce; then it fetches the results of
    // segment k-1. Where all memory is shared there is one segment and nothing to stage.
    Status allreduce_by_chunks() {
        segment_ = Group::stage_nbytes / (line * world_) * line * world_;
        piece_ = chunk(0, 0).nbytes;
        room_nbytes_ = piece_ * world_;
        shows_source_ = shows_target_ = true;
        return rounds([&](Bytes k) { reduce_and_show(k); },
                      [&] {
                          if (all_sources_shared() && !std::ranges::count(targets_, nullptr)) {
                              segment_ = everything;
                              return Bytes{1};
                          }
                          return count_cuts(task_.nbytes, segment_) + 1;
                      },
                      [&](Bytes k) { segment_ == everything ? reduce_chunk(0) : fetch_results(k); });
    }

    // Chunk `owner` of segment k, as a part of the array.
    Part chunk(Bytes k, Bytes owner) const {
        const Part whole = cut(task_.nbytes, segment_, k);
        const Part mine = cut(whole.nbytes, round_up((whole.nbytes + world_ - 1) / world_, line), owner);
        return {whole.start + mine.start, mine.nbytes};
    }

    void reduce_and_show(Bytes k) {
        if (k > 0) {
            reduce_chunk(k - 1);
        }
        if (!is_staged_ || k * segment_ >= task_.nbytes) {
            return;
        }
        for (Bytes owner = 0; owner < world_; ++owner) {
            if (const Part part = chunk(k, owner); owner != me_ && part.nbytes > 0) {
                show(room() + place_for(owner, me_) * piece_, task_.source + part.start, part.nbytes);
            }
        }
    }

    // Where a rank stages results: behind the chunks for all others.
    Bytes result_place() const { return (world_ - 1) * piece_; }

    // Reduces this rank's chunk of segment k: straight into all memory that is shared, and into the
    // stage for those whose memory is not.
    void reduce_chunk(Bytes k) {
        const Part part = chunk(k, me_);
        if (part.nbytes == 0) {
            return;
        }
        operands_.clear();
        places_.clear();
        bool is_fetched = false;
        for (Bytes rank = 0; rank < world_; ++rank) {
            const std::byte* source = shared_source(rank);
            operands_.push_back(source != nullptr
                                    ? source + part.start
                                    : shown(rank, group_.round() - 1) + place_for(me_, rank) * piece_);
            is_fetched |= rank != me_ && shared_target(rank) == nullptr;
        }
        if (is_fetched) {
            places_.push_back(room() + result_place());
        }
        places_.push_back(task_.target + part.start);
        for (Bytes rank = 0; rank < world_; ++rank) {
            if (rank != me_ && shared_target(rank) != nullptr) {
                places_.push_back(shared_target(rank) + part.start);
            }
        }
        reduce_to_places(part.nbytes);
        sent += part.nbytes;
        received += part.nbytes * (world_ - 1);
    }

    void fetch_results(Bytes k) {
        if (k == 0 || shared_target(me_) != nullptr) {
            return;
        }
        for (Bytes owner = 0; owner < world_; ++owner) {
            if (const Part part = chunk(k - 1, owner); owner != me_ && part.nbytes > 0) {
                fetch(task_.target + part.start, shown(owner) + result_place(), part.nbytes);
            }
        }
    }

    Status reduce_scatter() {
        piece_ = piece_for(world_ - 1, largest_block());
        shows_source_ = true;
        return rounds(
            [&](Bytes k) { show_pieces(k, [&](Bytes owner) { return block(owner); }); },
            [&] { return count_pieces(largest_block(), all_sources_shared()); },
            [&](Bytes k) {
                if (const Part part = cut(block(me_), piece_, k); part.nbytes > 0) {
                    reduce_ranks(world_, task_.target + part.start, block_start(me_) + part.start, true, part.nbytes);
                }
            });
    }

    // On every reader the first `num_ranks` ranks are reduced; of `last` nobody else reads the input. Memory that is
    // input and result is not shown in scans: it changes while the ranks above read the input.
    Status reduce_first(Bytes num_ranks, Bytes last) {
        piece_ = piece_for(1, task_.nbytes);
        shows_source_ = task_.kind == Kind::reduce || task_.source != task_.target;
        return rounds(
            [&](Bytes k) { show_piece(k, task_.nbytes); },
            [&] { return count_pieces(task_.nbytes, others_shared(last)); },
            [&](Bytes k) {
                if (const Part part = cut(task_.nbytes, piece_, k); num_ranks > 0 && part.nbytes > 0) {
                    reduce_ranks(num_ranks, task_.target + part.start, part.start, false, part.nbytes);
                }
            });
    }

    // Reduces the bytes of the first ranks from `start` on. Where they are staged, there may be a piece per rank.
    void reduce_ranks(Bytes num_ranks, std::byte* into, Bytes start, bool is_cut, Bytes nbytes) {
        operands_.clear();
        for (Bytes rank = 0; rank < num_ranks; ++rank) {
            const std::byte* const source = shared_source(rank);
            const Bytes place = is_cut ? place_for(me_, rank) * piece_ : 0;
            operands_.push_back(source != nullptr ? source + start : shown(rank) + place);
        }
        places_.assign(1, into);
        reduce_to_places(nbytes);
        received += nbytes * (num_ranks - 1);
    }

    // The number of rounds; with nothing staged one is enough for everything.
    Bytes count_pieces(Bytes largest, bool is_all_shared) {
        if (is_all_shared) {
            piece_ = everything;
            return 1;
        }
        return count_cuts(largest, piece_);
    }

    // Whether all inputs but this one are shared.
    bool others_shared(Bytes reader) const {
        Bytes rank = 0;
        while (rank < world_ && (rank == reader || is_source_shared(rank))) {
            ++rank;
        }
        return rank == world_;
    }

    Status broadcast() {
        piece_ = piece_for(1, task_.nbytes);
        is_followed_ = !is_small_;
        shows_source_ = me_ == root_;
        return rounds(
            [&](Bytes k) { show_piece(k, task_.nbytes); },
            [&] { return count_pieces(task_.nbytes, is_source_shared(root_)); },
            [&](Bytes k) {
                const Part part = cut(task_.nbytes, piece_, k);
                if (me_ != root_) {
                    take(root_, task_.target + part.start, part.start, 0, part.nbytes);
                } else {
                    keep(task_.target + part.start, task_.source + part.start, part.nbytes);
                }
            });
    }

    // Fetches bytes of a rank's input that begin at `start` there, or are the piece at `place` of its stage.
    void take(Bytes rank, std::byte* into, Bytes start, Bytes place, Bytes nbytes) {
        if (nbytes > 0) {
            if (const std::byte* const source = shared_source(rank)) {
                fetch(into, source + start, nbytes);
            } else if (is_followed_) {
                follow(rank, into, place * piece_, nbytes);
            } else {
                fetch(into, shown(rank) + place * piece_, nbytes);
            }
        }
    }

    // all_gather, and gather where only the root is a receiver.
    Status gather(bool is_receiver) {
        piece_ = piece_for(1, largest_block());
        is_followed_ = !is_small_ && task_.kind == Kind::gather;
        shows_source_ = true;
        return rounds(
            [&](Bytes k) { show_piece(k, block(me_)); },
            [&] {
                const bool is_shared = task_.kind == Kind::all_gather ? all_sources_shared() : others_shared(root_);
                return count_pieces(largest_block(), is_shared);
            },
            [&](Bytes k) {
                Bytes start = 0;
                for (Bytes rank = 0; is_receiver && rank < world_; start += block(rank++)) {
                    const Part part = cut(block(rank), piece_, k);
                    if (rank != me_) {
                        take(rank, task_.target + start + part.start, part.start, 0, part.nbytes);
                    } else {
                        keep(task_.target + start + part.start, task_.source + part.start, part.nbytes);
                    }
                }
            });
    }

    // Moves this rank's own part to its place, unless it is there.
    void keep(std::byte* into, const std::byte* from, Bytes nbytes) {
        if (into != from && nbytes > 0) {
            copy_moving(into, from, nbytes);
        }
    }

    Status scatter() {
        piece_ = piece_for(world_ - 1, largest_block());
        shows_source_ = me_ == root_;
        return rounds(
            [&](Bytes k) { show_pieces(k, [&](Bytes rank) { return block(rank); }); },
            [&] { return count_pieces(largest_block(), is_source_shared(root_)); },
            [&](Bytes k) {
                const Part part = cut(block(me_), piece_, k);
                const Bytes start = block_start(me_) + part.start;
                if (me_ == root_) {
                    keep(task_.target + part.start, task_.source + start, part.nbytes);
                } else {
                    take(root_, task_.target + part.start, start, place_for(me_, root_), part.nbytes);
                }
            });
    }

    Status all_to_all() {
        const Bytes largest = largest_block(world_ * world_);
        piece_ = piece_for(world_ - 1, largest);
        // In place, what others read here would be overwritten by what comes from them.
        shows_source_ = !task_.in_place;
        return rounds(
            [&](Bytes k) { show_pieces(k, [&](Bytes to) { return pair(me_, to); }); },
            [&] { return count_pieces(largest, all_sources_shared()); },
            [&](Bytes k) {
                Bytes start = 0;
                for (Bytes from = 0; from < world_; start += pair(from++, me_)) {
                    const Part part = cut(pair(from, me_), piece_, k);
                    const Bytes theirs = start_in_source(from, me_) + part.start;
                    if (from == me_) {
                        keep(task_.target + start + part.start, task_.source + theirs, part.nbytes);
                    } else {
                        take(from, task_.target + start + part.start, theirs, place_for(me_, from), part.nbytes);
                    }
                }
            });
    }

    Group& group_;
    const Task& task_;
    const WaitOptions& options_;
    const Bytes world_, me_, root_;
    bool shows_source_ = false, shows_target_ = false;  // whether others may use it in place
    bool is_staged_ = false;                            // whether this rank's input is staged
    bool is_small_ = false;                             // whether pieces are staged in the slots
    std::uint64_t posted_source_ = 0, posted_target_ = 0;  // offset + 1; 0: not shown
    Bytes piece_ = 0, segment_ = 0, num_shared_ = 0;
    Bytes room_nbytes_ = 0;      // what is staged in one round, at most
    std::byte* room_ = nullptr;  // where, once it is made
    bool is_followed_ = false;   // whether pieces are cut into messages
    Status trouble_;             // why what others have staged cannot be used
    std::vector<const std::byte*>& sources_;  // empty unless somebody has shared memory
    std::vector<std::byte*>& targets_;
    std::vector<const void*>& operands_;
    std::vector<std::byte*>& places_;
};

}  // namespace

Status run(Group& group, const Task& task, const WaitOptions& options) {
    if (group.has_error(options.sequence)) {
        group.show_idle();
        return {StatusCode::given_up};
    }
    group.begin_call();
    Run run(group, task, options);
    Status status;
    try {
        status = run.go();
    } catch (...) {  // no room for the staging area
        run.keep_shown();
        throw;
    }
    if (status.failed() && status.code != StatusCode::mismatch) {
        run.keep_shown();
        group.leave_call();
    } else {
        group.end_call();
    }
    if (group.size() > 1) {
        // Relaxed: counts for statistics.
        group.world().sent_nbytes.fetch_add(run.sent, std::memory_order_relaxed);
        group.world().received_nbytes.fetch_add(run.received, std::memory_order_relaxed);
    }
    return status;
}

}  // namespace ferrodist::shm
