// SPDX-License-Identifier: MIT OR Apache-2.0
// Warm memory: private memory for large results, kept for the next one when it is given back.
//
// The first touch of fresh pages costs about as much as the collective that fills them.
#pragma once

#include <cstddef>

namespace ferrodist {

// Below this, fresh memory is as quick.
constexpr std::size_t smallest_warm = std::size_t{1} << 20;

// Throws std::bad_alloc. Give the block back with release_warm.
void* take_warm(std::size_t nbytes);
void release_warm(void* block) noexcept;

// How much is kept for later, and never more than this.
std::size_t warm_nbytes();
constexpr std::size_t most_warm = std::size_t{256} << 20;

}  // namespace ferrodist
