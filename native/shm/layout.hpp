// SPDX-License-Identifier: MIT OR Apache-2.0
// How a group's block lies in memory. Everything the members share is in it, except what each keeps
// in its own arena: staging for large data, queues of messages, arrays of users.
//
//     GroupHeader | RankWords x W | queues W x W | waited W x W | Slot x 2 x W
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/futex.hpp"

namespace ferrodist::shm {

using namespace core;

constexpr std::size_t line = 64;

// What is said once, to all: why the group, or a call of it, is at its end.
struct alignas(2 * line) GroupErrorBlock {  // as RankWords, which follow it
    static constexpr std::size_t capacity = 16 * 1024;

    Word claim;  // rank + 1 of who writes it; 0: nobody
    Word ready;  // 1 when written, released; pairs with the acquires in Group::has_error and Group::group_error
    std::uint64_t sequence;
    std::uint64_t nbytes;
    std::byte bytes[capacity];
};

struct alignas(2 * line) GroupHeader {
    GroupErrorBlock group_error;
};

// The words of one rank. Each group of words that one process writes has lines of its own.
struct RankWords {
    static constexpr std::size_t leave_reason_capacity = 2048;

    alignas(2 * line) Word sleepers;  // how many sleep on this rank's epochs; written by the others
    // How far this rank is with what it stages in an even and in an odd round, while others follow it:
    // 1 + bytes so far; 0: nothing is missing.
    alignas(2 * line) Word staged[2];
    alignas(2 * line) Word presence;
    Word has_closed;    // it has said that it closes
    Word num_receives;  // point-to-point receives in flight
    Word sending_to;    // rank + 1 whom a blocked send is for; 0: none
    Word cycle_next;    // rank + 1 of the next in a cycle of sends; written by whoever found it
    Word num_moves;     // parts of large shared memory that this rank has copied or reduced
    std::uint32_t leave_reason_nbytes;
    std::byte leave_reason[leave_reason_capacity];
};

// What a rank says in one round. Two are used in turn: see Group.
//
// Epoch, call and the first bytes of small data share one line: a peer has them in one transfer.
struct alignas(line) Slot {
    static constexpr std::size_t nbytes = 4096;

    // Number of the round + 1, stored last; the number + 2 once this rank is barred from the round. Before, it is
    // that of an earlier round. See Group::bar_missing.
    Word epoch;
    std::uint32_t kind;
    std::uint64_t sequence;
    std::uint64_t fingerprint;
    std::uint64_t source;  // offset + 1 of the input in this rank's arena; 0: staged
    std::uint64_t target;  // offset + 1 of the output in this rank's arena; 0: private
    std::uint64_t stage;   // offset of what it stages in this round, if it does
    std::byte data[nbytes - 48];

    static constexpr std::size_t capacity = nbytes - 48;
};
static_assert(sizeof(Slot) == Slot::nbytes && offsetof(Slot, data) == 48);

using Offset = std::atomic<std::uint64_t>;

// Finds the parts of a group's block.
class GroupLayout {
public:
    GroupLayout(std::byte* base, std::size_t world) : base_(base), world_(world) {}

    static std::size_t nbytes(std::size_t world) { return slots_start(world) + world * 2 * sizeof(Slot); }

    GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(base_); }
    RankWords& words(std::size_t rank) const {
        return reinterpret_cast<RankWords*>(base_ + sizeof(GroupHeader))[rank];
    }
    // Where the queue of messages from one rank to another is in the sender's arena.
    Offset& queue(std::size_t from, std::size_t to) const {
        return tables()[from * world_ + to];
    }
    // How long, in ns, one rank has slept for another that was the last to come.
    Offset& waited(std::size_t rank, std::size_t for_rank) const {
        return tables()[(world_ + rank) * world_ + for_rank];
    }
    Slot& slot(std::size_t rank, std::size_t parity) const {
        return reinterpret_cast<Slot*>(base_ + slots_start(world_))[2 * rank + parity];
    }

private:
    static std::size_t tables_start(std::size_t world) {
        return sizeof(GroupHeader) + world * sizeof(RankWords);
    }
    static std::size_t slots_start(std::size_t world) {
        const std::size_t end = tables_start(world) + world * world * 2 * sizeof(Offset);
        return (end + Slot::nbytes - 1) / Slot::nbytes * Slot::nbytes;
    }
    Offset* tables() const { return reinterpret_cast<Offset*>(base_ + tables_start(world_)); }

    std::byte* base_;
    std::size_t world_;
};

}  // namespace ferrodist::shm
