// SPDX-License-Identifier: MIT OR Apache-2.0
// Collectives on made-up arrays, against plain loops over what every rank is known to have.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "shm/collectives.hpp"

namespace ferrodist::tests {

using Random = std::mt19937_64;

// One call, the same on all ranks. Every element is a function of the salt, its rank and its index.
struct Case {
    shm::Kind kind;
    DType dtype;
    Op op = Op::sum;
    int root = 0;
    std::size_t count = 0;                 // elements of the array, or of one rank's block
    std::vector<std::uint64_t> counts{};   // of the blocks, where they differ
    bool in_place = false;
    bool is_misaligned = false;
    std::vector<bool> shared_sources{}, shared_targets{};  // by rank: which memory is of its arena
    std::uint64_t salt = 0;

    std::string text() const;
};

enum class Memory { all_private, all_shared, any };

constexpr DType case_dtypes[] = {DType::float32, DType::int64, DType::float16, DType::boolean};
using shm::num_kinds;

// A call with about `nbytes` in all, or in a block where blocks are gathered.
Case make_case(Random& random, int world, shm::Kind kind, DType dtype, std::size_t nbytes, Memory memory);

// Does the call and checks its result on this rank. The input is overwritten as soon as the call has
// returned: nobody may still read it.
core::Status run_case(shm::Group& group, const Case& one, std::uint64_t sequence);

}  // namespace ferrodist::tests
