// SPDX-License-Identifier: MIT OR Apache-2.0
// The native executor: does what a plan says, over the links of a mesh, without the GIL.
//
// A message of a step is cut into pieces. They go out as the kernel takes them, those of the other
// side come straight into their cells, and each is reduced while later ones are on their way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "net/group.hpp"
#include "net/plan.hpp"

namespace ferrodist::net {

// What one collective works on.
struct Task {
    const std::byte* source;
    std::byte* target;
    bool is_in_place;  // source and target are the same memory
    std::uint64_t sequence, fingerprint;
};

Status execute(Group& group, const Plan& plan, const Task& task, const WaitOptions& options);

// One message to a rank and one from a rank at once, either may be missing (rank -1): for executors elsewhere.
Status exchange(Group& group, std::uint32_t kind, int to, Bytes outgoing, int from, std::byte* into,
                std::size_t size, const Task& task, const WaitOptions& options);

}  // namespace ferrodist::net
