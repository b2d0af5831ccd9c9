// SPDX-License-Identifier: MIT OR Apache-2.0
// Machines other than x86-64 have the portable level alone. Its twin is levels_x86_64.cpp.
#include <array>

#include "reduce/level.hpp"

namespace ferrodist::reduce_levels {
namespace {

constexpr std::array<const Level*, 1> only = {&portable};

}  // namespace

std::span<const Level* const> runnable() { return only; }

}  // namespace ferrodist::reduce_levels
