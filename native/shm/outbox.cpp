// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/outbox.hpp"

#include <new>

#include "copy.hpp"

namespace ferrodist::shm {
namespace {

constexpr std::size_t num_kept = 2;  // spare rings
constexpr std::size_t courier_block_nbytes = 4096;

}  // namespace

Bell& bell_at(Group& group, int peer) {
    return group.layout().bell(static_cast<std::size_t>(peer), static_cast<std::size_t>(group.rank()));
}

void Outbox::send(std::uint32_t tag, ByteView header, ByteView payload) {
    const std::lock_guard lock(mutex_);
    append(Record::whole, tag, header, payload);
}

Letter Outbox::offer(std::uint32_t tag, ByteView header, ByteView payload) {
    const auto place = group_.world().arena().find(payload.data(), payload.size());
    const std::lock_guard lock(mutex_);
    Courier& courier = free_courier();
    if (!place) {
        give_ring(courier);
    }
    Transfer& transfer = *courier.transfer;
    transfer.nbytes = payload.size();
    transfer.place = place.value_or(courier.ring);
    transfer.is_streamed = place ? 0 : 1;
    // Relaxed: the receiver looks at them only when it has seen the record that is appended below.
    transfer.bell.store(static_cast<std::uint32_t>(peer_), std::memory_order_relaxed);
    transfer.filled.store(0, std::memory_order_relaxed);
    transfer.emptied.store(0, std::memory_order_relaxed);
    transfer.stage.store(Transfer::offered, std::memory_order_relaxed);
    try {
        append(Record::offer, tag, header, std::as_bytes(std::span(&courier.offset, 1)));
    } catch (...) {
        transfer.emptied.store(Transfer::over, std::memory_order_relaxed);  // nobody has seen it
        throw;
    }
    courier.is_out = true;
    std::byte* const ring = place ? nullptr : group_.world().arena().base() + courier.ring;
    return {peer_, &courier, payload.data(), payload.size(), ring};
}

// Lock held.
void Outbox::append(Record::Kind kind, std::uint32_t tag, ByteView header, ByteView body) {
    if (!queue_) {
        queue_.emplace(group_.world().arena());
    }
    queue_->append(kind, tag, header, body);
    Offset& shown = group_.layout().queue(static_cast<std::size_t>(group_.rank()),
                                          static_cast<std::size_t>(peer_));
    if (shown.load(std::memory_order_relaxed) == 0) {  // only this rank writes it, under this lock
        // Pairs with the load in Inbox; seq_cst for the bell.
        shown.store(queue_->offset(), std::memory_order_seq_cst);
    }
    bell_at(group_, peer_).ring();
}

void Outbox::end(Letter& letter) {
    const std::lock_guard lock(mutex_);
    Courier& courier = *letter.courier;
    courier.is_out = false;
    // Not claimed, so the receiver never looks at the ring.
    if (courier.ring != 0 && courier.transfer->stage_now() == Transfer::withdrawn) {
        spare_rings_.push_back(courier.ring);
        courier.ring = 0;
    }
    take_rings_back();
    letter = {};
}

void Outbox::close() {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> blocks = queue_ ? queue_->blocks() : std::vector<std::size_t>{};
    blocks.insert(blocks.end(), courier_blocks_.begin(), courier_blocks_.end());
    blocks.insert(blocks.end(), spare_rings_.begin(), spare_rings_.end());
    for (Courier& courier : couriers_) {
        if (courier.is_out) {
            give_up(*courier.transfer);
        }
        if (courier.ring != 0) {
            blocks.push_back(courier.ring);
        }
    }
    for (const std::size_t block : blocks) {
        group_.keep_block(block);
    }
    bell_at(group_, peer_).ring();
}

void give_up(Transfer& transfer) {
    if (!transfer.move(Transfer::offered, Transfer::withdrawn)) {
        transfer.move(Transfer::claimed, Transfer::broken);
    }
}

// -- couriers and their rings: lock held -----------------------------------------------------------

Courier& Outbox::free_courier() {
    for (Courier& courier : couriers_) {
        if (!courier.is_out && courier.transfer->is_over()) {
            return courier;
        }
    }
    const std::size_t block = group_.world().arena().allocate(courier_block_nbytes);
    courier_blocks_.push_back(block);
    const std::size_t first = couriers_.size();
    for (std::size_t at = 0; at + sizeof(Transfer) <= courier_block_nbytes; at += sizeof(Transfer)) {
        auto* const transfer = new (group_.world().arena().base() + block + at) Transfer{};
        transfer->emptied.store(Transfer::over, std::memory_order_relaxed);  // nobody has seen it
        couriers_.push_back({transfer, block + at});
    }
    return couriers_[first];
}

void Outbox::take_rings_back() {
    for (Courier& courier : couriers_) {
        if (courier.ring != 0 && !courier.is_out && courier.transfer->is_over()) {
            spare_rings_.push_back(courier.ring);
            courier.ring = 0;
        }
    }
    while (spare_rings_.size() > num_kept) {
        group_.world().arena().free(spare_rings_.front());
        spare_rings_.erase(spare_rings_.begin());
    }
}

void Outbox::give_ring(Courier& courier) {
    take_rings_back();
    if (!spare_rings_.empty()) {
        courier.ring = spare_rings_.back();
        spare_rings_.pop_back();
        return;
    }
    courier.ring = group_.world().arena().allocate(Transfer::ring_nbytes);
}

// -- letters ---------------------------------------------------------------------------------------

bool can_fill(const Letter& letter) {
    if (letter.ring == nullptr || letter.num_filled == count_pieces(letter.nbytes)) {
        return false;
    }
    // Pairs with the receiver's stores in set_emptied: the pieces it has emptied may be filled again.
    const std::uint32_t emptied = letter.courier->transfer->emptied.load(std::memory_order_seq_cst);
    return emptied != Transfer::over && letter.num_filled - emptied < Transfer::num_pieces;
}

void fill(Letter& letter, Group& group) {
    const Piece piece(letter.nbytes, letter.num_filled);
    copy_bytes(letter.ring + piece.place, letter.payload + piece.start, piece.nbytes);
    // Pairs with the receiver's load in Messages; seq_cst for the bell.
    letter.courier->transfer->filled.store(++letter.num_filled, std::memory_order_seq_cst);
    bell_at(group, letter.peer).ring();
}

bool is_through(const Letter& letter) {
    if (letter.is_settled()) {
        return true;
    }
    const Transfer& transfer = *letter.courier->transfer;
    const bool is_filled = letter.ring != nullptr && letter.num_filled == count_pieces(letter.nbytes);
    return transfer.is_over() || (is_filled && transfer.stage_now() != Transfer::offered);
}

}  // namespace ferrodist::shm
