// SPDX-License-Identifier: MIT OR Apache-2.0
// Queue: messages from one rank to another, oldest first, in the sender's arena.
//
// It is a chain of *segments*. In a segment record follows record, each on lines of its own, and
// behind the last one stands a record of kind `nothing`: what the receiver looks at is the very line
// the next message comes in. A record that does not fit goes to another segment, to which a link
// leads. The receiver counts the segments it is through with; the sender uses those again.
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

// Followed by its body, then by the header of the message.
struct Record {
    enum Kind : std::uint32_t {
        nothing,  // not yet
        whole,    // the body is the payload
        offer,    // the body is the offset of a Transfer
        link,     // the body is a Segment, where the next record is
    };

    Word kind;  // stored last
    std::uint32_t tag;
    std::uint32_t header_nbytes;
    std::uint32_t body_nbytes;
};

struct Segment {
    std::uint64_t offset;
    std::uint64_t nbytes;
};

// What a queue's block begins with; the first segment is the rest of the block.
struct alignas(2 * line) Queue {
    static constexpr std::size_t block_nbytes = 4096;

    Word num_read;  // segments the receiver is through with; written by it
};

// The sender's end. One thread at a time.
class QueueWriter {
public:
    explicit QueueWriter(Arena& arena);

    std::size_t offset() const { return offset_; }
    // Throws OutOfMemory, and then nothing was appended. Whoever waits has to be woken.
    void append(Record::Kind kind, std::uint32_t tag, ByteView header, ByteView body);
    // All blocks the queue is made of.
    std::vector<std::size_t> blocks() const;

private:
    Record& record(std::size_t position) const;
    void put(Record::Kind kind, std::uint32_t tag, ByteView header, ByteView body);
    void open_segment(std::size_t record_nbytes);
    Segment take_segment(std::size_t nbytes);
    void reclaim();

    Arena& arena_;
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
    ByteView header, body;
};

// The receiver's end. One thread at a time. The peer is not trusted: nothing beyond its arena is
// ever looked at.
class QueueReader {
public:
    enum class Look { nothing, message, corrupt };

    // `offset` is where the peer says that its queue is.
    QueueReader(const Peer& peer, std::uint64_t offset);

    // Whether front() has something to tell.
    bool has_news() const;
    // The oldest message; it stays where it is until pop().
    Look front(Message& message);
    void pop() { position_ += front_nbytes_; }

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
