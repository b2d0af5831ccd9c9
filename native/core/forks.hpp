// SPDX-License-Identifier: MIT OR Apache-2.0
// Children of fork() have copies of what belongs to the parent, and must not change what it shares.
#pragma once

#include <cstdint>

namespace ferrodist::core {

// How often the memory of this process has been copied by fork() since it first asked: whatever was
// made under another number belongs to an ancestor.
std::uint32_t fork_generation();

// Remembers who made the object it is part of.
class Birth {
public:
    bool is_of_ancestor() const { return generation_ != fork_generation(); }

private:
    std::uint32_t generation_ = fork_generation();
};

}  // namespace ferrodist::core
