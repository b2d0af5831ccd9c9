// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/queue.hpp"

#include <algorithm>
#include <cstring>

#include "core/memory.hpp"

namespace ferrodist::shm {
namespace {

constexpr std::size_t largest_segment = 256 * 1024;
constexpr std::size_t num_kept = 32;  // spare segments at most: new memory takes longer than a copy
// Long bodies go round so many: lines that are still in the receiver's cache are slow to write.
constexpr std::size_t num_rotated = 6;
constexpr std::size_t body_piece = 16 * 1024;  // written at one go: the receiver copies it meanwhile

constexpr std::size_t round_up(std::size_t nbytes) { return (nbytes + line - 1) / line * line; }

// Where the body begins, from the beginning of its record: a long one on a line of its own, where it is
// copied faster.
constexpr std::size_t body_start(std::size_t header_nbytes, std::size_t body_nbytes) {
    const std::size_t start = sizeof(Record) + header_nbytes;
    return body_nbytes < 1024 ? start : round_up(start);
}

constexpr std::size_t record_nbytes(std::size_t header_nbytes, std::size_t body_nbytes) {
    return round_up(body_start(header_nbytes, body_nbytes) + body_nbytes);
}

// Every segment has room for this behind its records: a link, or a record of kind `nothing`.
constexpr std::size_t link_nbytes = record_nbytes(0, sizeof(Segment));
static_assert(link_nbytes == line);

Segment first_segment(std::uint64_t queue_offset) {
    return {queue_offset + sizeof(Queue), Queue::block_nbytes - sizeof(Queue)};
}

}  // namespace

// -- the sender's end ------------------------------------------------------------------------------

// Fresh memory is zero: no segment read, and nothing in the first.
QueueWriter::QueueWriter(Arena& arena, Doorbell& doorbell)
    : arena_(arena), doorbell_(doorbell), offset_(arena.allocate(Queue::block_nbytes)), used_{first_segment(offset_)} {}

Record& QueueWriter::record(std::size_t position) const {
    return *reinterpret_cast<Record*>(arena_.base() + used_.back().offset + position);
}

void QueueWriter::append(Record::Kind kind, std::uint32_t tag, std::uint64_t number, ByteView header,
                         ByteView body) {
    if (used_.size() > 1) {
        reclaim();
    }
    const std::size_t nbytes = record_nbytes(header.size(), body.size());
    if (position_ + nbytes + link_nbytes > used_.back().nbytes) {
        open_segment(nbytes);
    }
    put(kind, tag, number, header, body);
    position_ += nbytes;
}

void QueueWriter::put(Record::Kind kind, std::uint32_t tag, std::uint64_t number, ByteView header,
                      ByteView body) {
    Record& place = record(position_);
    place.tag = tag;
    place.number = number;
    place.header_nbytes = static_cast<std::uint32_t>(header.size());
    place.body_nbytes = static_cast<std::uint32_t>(body.size());
    auto* const start = reinterpret_cast<std::byte*>(&place + 1);
    std::byte* const target = reinterpret_cast<std::byte*>(&place) + body_start(header.size(), body.size());
    copy_bytes(start, header.data(), header.size());
    if (kind != Record::link) {
        // Relaxed: the receiver looks there only when it has seen the store to `kind` below.
        record(position_ + record_nbytes(header.size(), body.size()))
            .kind.store(Record::nothing, std::memory_order_relaxed);
    }
    const bool is_short = body.size() <= body_piece;
    if (is_short) {
        copy_bytes(target, body.data(), body.size());
    }
    // Relaxed: seen through `kind`.
    place.filled.store(is_short ? place.body_nbytes : 0, std::memory_order_relaxed);
    // Pairs with QueueReader::read; seq_cst for the doorbell.
    place.kind.store(kind, std::memory_order_seq_cst);
    for (std::size_t begin = 0; !is_short && begin < body.size(); begin += body_piece) {
        doorbell_.ring();
        const std::size_t size = std::min(body_piece, body.size() - begin);
        copy_bytes(target + begin, body.data() + begin, size);
        // Pairs with Message::num_there; seq_cst for the doorbell.
        place.filled.store(static_cast<std::uint32_t>(begin + size), std::memory_order_seq_cst);
    }
    doorbell_.ring();
}

// Goes on in another segment, which has room for a record of this size.
void QueueWriter::open_segment(std::size_t nbytes) {
    used_.reserve(used_.size() + 1);  // what may throw comes first
    const Segment next = take_segment(nbytes + link_nbytes);
    auto* const first = reinterpret_cast<Record*>(arena_.base() + next.offset);
    first->kind.store(Record::nothing, std::memory_order_relaxed);  // seen only through the link
    put(Record::link, 0, 0, {}, std::as_bytes(std::span(&next, 1)));
    used_.push_back(next);
    position_ = 0;
}

Segment QueueWriter::take_segment(std::size_t nbytes) {
    const auto fits = [&](const Segment& segment) { return segment.nbytes >= nbytes; };
    const auto found = std::find_if(spare_.begin(), spare_.end(), fits);
    const bool has_spare = found != spare_.end();
    if (!has_spare || (nbytes > body_piece && spare_.size() < num_rotated)) {
        try {
            const std::size_t size = std::max(nbytes, next_nbytes_);
            const Segment segment{arena_.allocate(size), size};
            next_nbytes_ = std::min(2 * next_nbytes_, largest_segment);
            return segment;
        } catch (const OutOfMemory&) {
            if (!has_spare) {
                throw;
            }
        }
    }
    const Segment segment = *found;
    spare_.erase(found);
    return segment;
}

// Takes back the segments that the receiver is through with. Some are kept for later.
void QueueWriter::reclaim() {
    // Pairs with the release in QueueReader::front: the receiver never looks at them again.
    const std::uint32_t num_read = queue().num_read.load(std::memory_order_acquire);
    while (num_reclaimed_ != num_read && used_.size() > 1) {
        if (used_.front().offset != first_segment(offset_).offset) {  // that one is not a block
            spare_.push_back(used_.front());
        }
        used_.erase(used_.begin());
        ++num_reclaimed_;
    }
    while (spare_.size() > num_kept) {
        arena_.free(spare_.front().offset);
        spare_.erase(spare_.begin());
    }
}

std::vector<std::size_t> QueueWriter::blocks() const {
    std::vector<std::size_t> found{offset_};
    for (const auto* list : {&used_, &spare_}) {
        for (const Segment& segment : *list) {
            if (segment.offset != first_segment(offset_).offset) {
                found.push_back(segment.offset);
            }
        }
    }
    return found;
}

// -- the receiver's end ----------------------------------------------------------------------------

QueueReader::QueueReader(const Peer& peer, std::uint64_t offset)
    : peer_(peer), queue_(reinterpret_cast<Queue*>(peer.at(offset, Queue::block_nbytes))) {
    if (queue_ != nullptr) {
        enter(first_segment(offset));
    }
}

// Goes to the beginning of a segment; false if it cannot be one.
bool QueueReader::enter(const Segment& segment) {
    const bool is_possible = segment.offset % line == 0 && segment.nbytes >= link_nbytes;
    start_ = is_possible ? peer_.at(segment.offset, segment.nbytes) : nullptr;
    nbytes_ = segment.nbytes;
    position_ = 0;
    return start_ != nullptr;
}

QueueReader::Look QueueReader::front(Message& message) {
    const Look poll = read(message);
    if (poll != Look::message || message.kind != Record::link) {
        return poll;
    }
    Segment next;
    if (message.body.size() != sizeof(next)) {
        return Look::corrupt;
    }
    std::memcpy(&next, message.body.data(), sizeof(next));
    if (!enter(next)) {
        return Look::corrupt;
    }
    // Pairs with the acquire in reclaim.
    queue_->num_read.fetch_add(1, std::memory_order_release);
    const Look second = read(message);
    const bool is_empty = second == Look::message && message.kind == Record::link;  // a segment never is
    return is_empty ? Look::corrupt : second;
}

// The record at the present position, as far as it lies in the segment.
QueueReader::Look QueueReader::read(Message& message) {
    if (start_ == nullptr || nbytes_ - position_ < sizeof(Record)) {
        return Look::corrupt;
    }
    const auto& record = *reinterpret_cast<const Record*>(start_ + position_);
    // Pairs with the store in QueueWriter::put: the record was written before, but for a long body. Seq_cst
    // for the doorbell that is slept on.
    const std::uint32_t kind = record.kind.load(std::memory_order_seq_cst);
    if (kind == Record::nothing) {
        return Look::nothing;
    }
    const std::size_t header_nbytes = record.header_nbytes, body_nbytes = record.body_nbytes;
    front_nbytes_ = record_nbytes(header_nbytes, body_nbytes);
    if (kind > Record::link || front_nbytes_ > nbytes_ - position_) {
        return Look::corrupt;
    }
    const auto* const start = reinterpret_cast<const std::byte*>(&record + 1);
    message = {static_cast<Record::Kind>(kind), record.tag, record.number, {start, header_nbytes},
               {reinterpret_cast<const std::byte*>(&record) + body_start(header_nbytes, body_nbytes), body_nbytes},
               &record.filled};
    return Look::message;
}

}  // namespace ferrodist::shm
