// SPDX-License-Identifier: MIT OR Apache-2.0
// Which cores a process may use: decides how long a wait spins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferrodist::shm {

// One bit per core, as of sched_getaffinity.
using CpuMask = std::array<std::uint64_t, 16>;

CpuMask allowed_cpus();
std::size_t count_union(std::span<const CpuMask> masks);
// Cores' worth of time the container grants, rounded up; a large number where there is no limit.
std::size_t container_cpus();

}  // namespace ferrodist::shm
