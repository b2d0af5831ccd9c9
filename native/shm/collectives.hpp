// SPDX-License-Identifier: MIT OR Apache-2.0
// Whole collectives over the rounds of a group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"
#include "shm/group.hpp"

namespace ferrodist::shm {

// The codes of ferrodist.call.Kind.
enum class Kind : std::uint32_t {
    allreduce, broadcast, reduce, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier, scan, exscan,
};

constexpr int num_kinds = static_cast<int>(Kind::exscan) + 1;

// What one rank asks for. Sizes are in bytes; the ranks have agreed on them, or the fingerprints
// differ.
struct Task {
    Kind kind;
    DType dtype = DType::uint8;
    Op op = Op::sum;
    int root = 0;
    const std::byte* source = nullptr;  // null where this rank has no input
    std::byte* target = nullptr;        // null where it gets no result
    // The size of the whole array; where it is cut by rank, of one rank's block.
    std::size_t nbytes = 0;
    // Sizes of the blocks where they differ: one per rank, in all_to_all one per (sender, receiver).
    const std::uint64_t* blocks = nullptr;
    bool in_place = false;  // the source shares memory with the target
    std::uint64_t fingerprint = 0;
};

// Does one collective. The first round compares sequence and fingerprint of all ranks.
Status run(Group& group, const Task& task, const WaitOptions& options);

}  // namespace ferrodist::shm
