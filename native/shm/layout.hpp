// SPDX-License-Identifier: MIT OR Apache-2.0
// What lies in shared memory: the header of every arena, and the block of a group. Everything the members of a group
// share is in its block, except what each keeps in its own arena: staging for large data, queues of messages, arrays
// of users.
//
//     GroupHeader | RankWords x W | queues W x W | waited W x W | Slot x 2 x W
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "core/futex.hpp"

namespace ferrodist::shm {

using namespace core;

constexpr std::size_t line = 64;

// -- arenas ----------------------------------------------------------------------------------------

// A word to sleep on, for waits for something that is said elsewhere.
//
// The sleeper counts itself, reads `rings`, looks once more at what it waits for, and sleeps while
// `rings` stays the same: that is wait_until(rings, sleepers, ...). The ringer changes what is waited
// for, then rings. The change and the look at it have to be seq_cst, as is all of this: so either the
// sleeper sees the change or the ringer sees the sleeper. While nobody sleeps a ring is but a read.
struct Doorbell {
    Word rings;
    Word sleepers;

    void ring() {
        // Pairs with the sleeper's fetch_add in wait_until.
        if (sleepers.load(std::memory_order_seq_cst) != 0) {
            rings.fetch_add(1, std::memory_order_seq_cst);  // pairs with the sleeper's load there
            wake_all(rings);
        }
    }
};
static_assert(sizeof(Doorbell) == 8);

// Text that one process rewrites while others read it.
//
// A seqlock: the version is odd while the text changes, and a reader tries again if it moved.
template <std::size_t capacity>
class SharedText {
public:
    // Only one thread may write at a time. Longer text is cut.
    void write(std::string_view text) {
        const std::uint32_t version = version_.load(std::memory_order_relaxed);
        version_.store(version + 1, std::memory_order_relaxed);
        // Pairs with the acquire fence in read: no word is seen before the odd version.
        std::atomic_thread_fence(std::memory_order_release);
        const std::size_t nbytes = std::min(text.size(), capacity);
        nbytes_.store(static_cast<std::uint32_t>(nbytes), std::memory_order_relaxed);
        for (std::size_t at = 0; at < nbytes; at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, nbytes - at));
            words_[at / 8].store(word, std::memory_order_relaxed);
        }
        // Pairs with the first load in read.
        version_.store(version + 2, std::memory_order_release);
    }

    // Empty if the writer is in the middle, or died there.
    std::string read() const {
        for (int attempt = 0; attempt < 100; ++attempt) {
            // Pairs with the release in write.
            const std::uint32_t before = version_.load(std::memory_order_acquire);
            std::string text(std::min<std::size_t>(nbytes_.load(std::memory_order_relaxed), capacity), ' ');
            for (std::size_t at = 0; at < text.size(); at += 8) {
                const std::uint64_t word = words_[at / 8].load(std::memory_order_relaxed);
                std::memcpy(text.data() + at, &word, std::min<std::size_t>(8, text.size() - at));
            }
            // Pairs with the release fence in write.
            std::atomic_thread_fence(std::memory_order_acquire);
            if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) {
                return text;
            }
        }
        return {};
    }

private:
    std::atomic<std::uint32_t> version_{0};
    std::atomic<std::uint32_t> nbytes_{0};
    std::array<std::atomic<std::uint64_t>, capacity / 8> words_{};
};

// What a process shows of itself. Written by its heartbeat only.
struct Beat {
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::int64_t> held_ns{0};  // how long a thread has been held in one call: see HeldThread
};

// Where a member of a group stands. Only `swept` members never look at the group's block again.
enum Presence : std::uint32_t { inside = 0, closing = 1, left = 2, swept = 3 };

// A group that a process is about to join, shown to the other members. `id` 0 is a free entry.
struct Invitation {
    std::atomic<std::uint64_t> id;       // written last, released; pairs with find_invitation
    std::atomic<std::uint64_t> block;    // where the group's block is in this arena; 0: not here
    std::atomic<std::uint64_t> members;  // where the list of world ranks is in this arena
    std::atomic<std::uint64_t> num_members;
    Word is_joining;  // whether this process is about to enter the block
};

// What every arena begins with. Written by its owner only, except `sleepers` and the doorbell.
struct ArenaHeader {
    static constexpr std::size_t num_invitations = 256;

    Beat beat;
    SharedText<1024> report;  // what the process is waiting in, while it is
    Word invitations_changed;
    Word sleepers;
    alignas(2 * 64) Word cpu;  // where the process was last seen: see Spins; seldom written, often read
    alignas(2 * 64) Doorbell doorbell;  // of the process: rung for all that concerns its messages
    Invitation invitations[num_invitations];
};

// -- the block of a group ----------------------------------------------------------------------------

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
    Word cycle_next;    // rank + 1 of the next in a cycle of sends; written by the rank that found it
    Word num_moves;     // parts of large shared memory that this rank has copied or reduced
    Word ready_for;     // number of the last call in flight that this rank was about to begin
    // 1 << 32 | round: since a call failed here, this rank uses nothing that was shown in earlier rounds; 0: none has.
    std::atomic<std::uint64_t> out_of;
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
