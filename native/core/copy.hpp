// SPDX-License-Identifier: MIT OR Apache-2.0
// Copying memory that does not overlap, by our own loop where that is quicker than the C library's.
#pragma once

#include <cstddef>
#include <cstring>

#include "reduce/reduce.hpp"

namespace ferrodist {

// From here on glibc may take "rep movsb", on some CPUs several times slower than vectors.
constexpr std::size_t largest_memcpy = 1024;

inline void copy_bytes(void* into, const void* from, std::size_t nbytes) {
    if (nbytes == 0) {
        return;  // the addresses may be null then
    }
    if (nbytes <= largest_memcpy) {
        std::memcpy(into, from, nbytes);
        return;
    }
    local_reduce(DType::uint8, Op::bor, into, &from, 1, nbytes, 1);  // of one operand: a copy
}

}  // namespace ferrodist
