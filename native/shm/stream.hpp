// SPDX-License-Identifier: MIT OR Apache-2.0
// Stream: how the data of one large message gets from the sender's memory to the receiver's.
//
// A payload in the sender's arena is copied from where it is. Any other goes through a ring of pieces
// in the arena, which the sender fills while the receiver empties it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shm/layout.hpp"

namespace ferrodist::shm {

// In the sender's arena, before its ring. It ends when the receiver has all of it; the sender may break
// it before. It is over when the receiver has set `emptied` to `over`, whatever the stage: the receiver
// does not touch it any more.
struct alignas(2 * line) Stream {
    enum Stage : std::uint32_t { active, ended, broken };

    static constexpr std::uint32_t over = ~std::uint32_t{0};
    static constexpr std::size_t piece_nbytes = 64 * 1024;
    static constexpr std::uint32_t num_pieces = 32;
    static constexpr std::size_t ring_nbytes = num_pieces * piece_nbytes;
    static constexpr std::size_t ring_start = 4096;  // behind the stream

    Word stage;
    alignas(line) Word filled;   // pieces, counted by the sender
    alignas(line) Word emptied;  // pieces, counted by the receiver

    // All of these are seq_cst, for the doorbell that is rung after a change and slept on after a look.
    std::uint32_t stage_now() const { return stage.load(std::memory_order_seq_cst); }
    bool move(Stage from, Stage to) {  // pairs with the other side's move and stage_now
        std::uint32_t expected = from;
        return stage.compare_exchange_strong(expected, to, std::memory_order_seq_cst);
    }
    bool is_over() const {  // pairs with the receiver's last store to `emptied`
        return emptied.load(std::memory_order_seq_cst) == over;
    }
};

// What the receiver is told of it: offsets in the sender's arena.
struct DataPlace {
    std::uint64_t stream;
    std::uint64_t payload;  // 0: it goes through the ring
    // The piece of the ring it begins with: behind the message before, for lines that are still in the
    // receiver's cache are slow to write.
    std::uint64_t first_piece;
};

// A piece of a payload, and where it lies in the ring.
struct Piece {
    Piece(std::size_t nbytes_in_all, std::uint32_t index, std::uint32_t first)
        : start(index * Stream::piece_nbytes),
          nbytes(std::min(Stream::piece_nbytes, nbytes_in_all - start)),
          place((first + index) % Stream::num_pieces * Stream::piece_nbytes) {}

    std::size_t start, nbytes, place;
};

constexpr std::uint32_t count_pieces(std::size_t nbytes) {
    return static_cast<std::uint32_t>((nbytes + Stream::piece_nbytes - 1) / Stream::piece_nbytes);
}

}  // namespace ferrodist::shm
