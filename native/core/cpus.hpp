// SPDX-License-Identifier: MIT OR Apache-2.0
// How much time on its cores a process may use.
#pragma once

#include <cstddef>

namespace ferrodist::core {

// Cores' worth of time the container grants, rounded up; a large number where there is no limit.
std::size_t container_cpus();

}  // namespace ferrodist::core
