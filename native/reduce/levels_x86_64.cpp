// SPDX-License-Identifier: MIT OR Apache-2.0
// Which levels an x86-64 machine can run. Its twin is levels_other.cpp.
#include <array>

#include "reduce/level.hpp"

namespace ferrodist::reduce_levels {
namespace {

// These also ask whether the operating system saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

constexpr std::array<const Level*, 3> best_first = {&avx512, &avx2, &portable};

}  // namespace

std::span<const Level* const> runnable() {
    const std::size_t skipped = has_avx512() ? 0 : has_avx2() ? 1 : 2;
    return std::span(best_first).subspan(skipped);
}

}  // namespace ferrodist::reduce_levels
