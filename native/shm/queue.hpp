// SPDX-License-Identifier: MIT OR Apache-2.0
// Queue: what one rank tells another of messages, oldest first, in the sender's arena.
//
// It is a chain of *segments*. In a segment record follows record, each on lines of its own, and
// behind the last one stands a record of kind `nothing`: what the receiver looks at is the very line
// the next message comes in. A record that does not fit goes to another segment, to which a link
// leads. The receiver counts the segments it is through with; the sender uses those again.
//
// A long body is written in pieces after its record is there, so that the receiver copies one piece out
// while the next is copied in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shm/arena.hpp"
#include "shm/layout.hpp"
#include "shm/world.hpp"

namespace ferrodist::shm {

using ByteView = std::span<const std::byte>;

// Followed by the header of the message, then by its body.
struct Record {
    enum Kind : std::uint32_t {
        nothing,   // not yet
        eager,     // the body is the payload
        rts,       // the body is the size of the payload
        cts,
        data,      // the body is a DataPlace
        taken,
        withdraw,
        link,      // the body is a Segment, where the next record is
    };

    Word kind;  // stored last, but for the pieces of a long body
    std::uint32_t tag;
    std::uint64_t number;  // of a large message
    std::uint32_t header_nbytes;
    std::uint32_t body_nbytes;
    Word filled;  // how much of the body is there
};

struct Segment {
    std::uint64_t offset;
    std::uint64_t nbytes;
};

// What a queue's block begins with; the first segment is the rest of the block. Written by the receiver.
struct alignas(2 * line) Queue {
    static constexpr std::size_t block_nbytes = 4096;

    Word num_read;  // segments it is through with
    std::atomic<std::uint64_t> num_received;  // bytes of eager messages, as Messages counts them
};

// The sender's end. One thread at a time.
class QueueWriter {
public:
    QueueWriter(Arena& arena, Doorbell& doorbell);

    std::size_t offset() const { return offset_; }
    // Throws OutOfMemory, and then nothing was appended. Rings the doorbell.
    void append(Record::Kind kind, std::uint32_t tag, std::uint64_t number, ByteView header, ByteView body);
    std::uint64_t num_received() const {
        // Pairs with the store in Messages::count_received; orders nothing.
        return queue().num_received.load(std::memory_order_relaxed);
    }
    // All blocks the queue is made of.
    std::vector<std::size_t> blocks() const;

private:
    Queue& queue() const { return *reinterpret_cast<Queue*>(arena_.base() + offset_); }
    Record& record(std::size_t position) const;
    void put(Record::Kind kind, std::uint32_t tag, std::uint64_t number, ByteView header, ByteView body);
    void open_segment(std::size_t record_nbytes);
    Segment take_segment(std::size_t nbytes);
    void reclaim();

    Arena& arena_;
    Doorbell& doorbell_;
    std::size_t offset_;
    std::vector<Segment> used_;  // oldest first; records go to the last
    std::vector<Segment> spare_;
    std::uint32_t num_reclaimed_ = 0;
    std::size_t next_nbytes_ = 32 * 1024;  // how large the next new segment becomes
    std::size_t position_ = 0;
};

// A message as it lies in the queue.
struct Message {
    Record::Kind kind;
    std::uint32_t tag;
    std::uint64_t number;
    ByteView header, body;
    const Word* filled;

    // How much of the body may be read.
    std::size_t num_there() const {
        // Pairs with the store in QueueWriter::put; seq_cst for the doorbell that is slept on.
        return std::min<std::size_t>(filled->load(std::memory_order_seq_cst), body.size());
    }
};

// The receiver's end. One thread at a time. The peer is not trusted: nothing beyond its arena is
// ever looked at.
class QueueReader {
public:
    enum class Look { nothing, message, corrupt };

    // `offset` is where the peer says that its queue is.
    QueueReader(const Peer& peer, std::uint64_t offset);

    // The oldest message; it stays where it is until pop().
    Look front(Message& message);
    void pop() { position_ += front_nbytes_; }
    // Says how much was received so far.
    void set_received(std::uint64_t nbytes) {
        if (queue_ != nullptr) {
            queue_->num_received.store(nbytes, std::memory_order_relaxed);  // pairs with num_received
        }
    }

private:
    bool enter(const Segment& segment);
    Look read(Message& message);

    const Peer& peer_;
    Queue* queue_;
    std::byte* start_ = nullptr;  // of the segment; null if it is none
    std::size_t nbytes_ = 0;
    std::size_t position_ = 0;
    std::size_t front_nbytes_ = 0;
};

}  // namespace ferrodist::shm
