// SPDX-License-Identifier: MIT OR Apache-2.0
// Transfer: how one large message gets from the sender's memory to the receiver's.
//
// A payload in the sender's arena is copied from where it is. Any other goes through a ring of
// pieces in the arena, which the sender fills while the receiver empties it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shm/layout.hpp"

namespace ferrodist::shm {

// In the sender's arena. The stage goes from offered to claimed to ended; the sender may turn
// offered into withdrawn, and claimed into broken. A transfer is over when the receiver has set
// `emptied` to `over`, whatever the stage: it does not touch it any more.
struct alignas(2 * line) Transfer {
    enum Stage : std::uint32_t { offered, claimed, ended, withdrawn, broken };

    static constexpr std::uint32_t over = ~std::uint32_t{0};
    static constexpr std::size_t piece_nbytes = 256 * 1024;
    static constexpr std::uint32_t num_pieces = 4;
    static constexpr std::size_t ring_nbytes = num_pieces * piece_nbytes;

    Word stage;
    Word bell;  // which bell of the sender's to ring: the one for messages of this rank
    std::uint64_t nbytes;
    std::uint64_t place;        // of the payload, or of the ring, in the sender's arena
    std::uint32_t is_streamed;  // whether it is the ring
    alignas(line) Word filled;  // pieces, counted by the sender
    alignas(line) Word emptied;  // pieces, counted by the receiver

    // All of these are seq_cst, for the bell that is rung after a change and slept on after a look.
    std::uint32_t stage_now() const { return stage.load(std::memory_order_seq_cst); }
    bool move(Stage from, Stage to) {  // pairs with the other side's move and stage_now
        std::uint32_t expected = from;
        return stage.compare_exchange_strong(expected, to, std::memory_order_seq_cst);
    }
    bool is_over() const {  // pairs with the receiver's last store to `emptied`
        return emptied.load(std::memory_order_seq_cst) == over;
    }
};

// A piece of a payload, and where it lies in the ring.
struct Piece {
    Piece(std::size_t nbytes_in_all, std::uint32_t index)
        : start(index * Transfer::piece_nbytes),
          nbytes(std::min(Transfer::piece_nbytes, nbytes_in_all - start)),
          place(index % Transfer::num_pieces * Transfer::piece_nbytes) {}

    std::size_t start, nbytes, place;
};

constexpr std::uint32_t count_pieces(std::size_t nbytes) {
    return static_cast<std::uint32_t>((nbytes + Transfer::piece_nbytes - 1) / Transfer::piece_nbytes);
}

}  // namespace ferrodist::shm
