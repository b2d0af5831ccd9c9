// SPDX-License-Identifier: MIT OR Apache-2.0
// How a call ended, and how long it may wait: the words that shared memory and TCP have in common.
#pragma once

#include <cstddef>
#include <span>

#include "shm/wait.hpp"

namespace ferrodist::core {

using Status = shm::Ending;
using StatusCode = shm::Outcome;
using WaitOptions = shm::Patience;
using Bytes = std::span<const std::byte>;

}  // namespace ferrodist::core
