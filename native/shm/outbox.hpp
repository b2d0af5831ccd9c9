// SPDX-License-Identifier: MIT OR Apache-2.0
// Outbox: the sender's side of the messages from this rank to one other.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "shm/group.hpp"
#include "shm/queue.hpp"
#include "shm/transfer.hpp"

namespace ferrodist::shm {

// Carries one large message at a time. Lasts as long as its outbox.
struct Courier {
    Transfer* transfer;
    std::uint64_t offset;  // of the transfer
    std::size_t ring = 0;  // where its ring is; 0: it has none
    bool is_out = false;   // a letter goes with it
};

// A message on its way. It has to be ended: by Messages::settle that went well, by take_back that
// returned true, or by abandon.
struct Letter {
    int peer = -1;
    Courier* courier = nullptr;  // null: nothing to wait for
    const std::byte* payload = nullptr;
    std::size_t nbytes = 0;
    std::byte* ring = nullptr;  // null: the receiver copies the payload from where it is
    std::uint32_t num_filled = 0;
    bool is_of_call = false;   // part of a collective: even who closes is going to take it
    bool holds_caller = true;  // whether the caller of settle can do nothing else meanwhile

    bool is_settled() const { return courier == nullptr; }
};

class Outbox {
public:
    Outbox(Group& group, int peer) : group_(group), peer_(peer) {}

    // Several threads may send; nobody waits for the receiver here. Throws OutOfMemory.
    void send(std::uint32_t tag, ByteView header, ByteView payload);
    Letter offer(std::uint32_t tag, ByteView header, ByteView payload);
    // Ends a letter: its courier may carry another when the receiver is through with this one.
    void end(Letter& letter);
    // Gives up what was not ended, and lets the group take care of the blocks.
    void close();

private:
    void append(Record::Kind kind, std::uint32_t tag, ByteView header, ByteView body);
    Courier& free_courier();
    void take_rings_back();
    void give_ring(Courier& courier);

    Group& group_;
    int peer_;
    std::mutex mutex_;
    std::optional<QueueWriter> queue_;
    std::deque<Courier> couriers_;
    std::vector<std::size_t> courier_blocks_, spare_rings_;
};

// Withdraws what the receiver has not claimed, and breaks what it has.
void give_up(Transfer& transfer);

// What a peer sleeps on while it waits for this rank.
Bell& bell_at(Group& group, int peer);

// -- what the thread that a letter belongs to does with it -------------------------------------------

// Whether the letter goes through a ring that has room for its next piece.
bool can_fill(const Letter& letter);
// Copies the next piece into the ring.
void fill(Letter& letter, Group& group);
// Whether the payload may change: the receiver is taking the letter and needs it no more.
bool is_through(const Letter& letter);

}  // namespace ferrodist::shm
