// SPDX-License-Identifier: MIT OR Apache-2.0
// SharedGroup: a group as Python sees it, and the order of its calls. Touched only with the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "bind/progress.hpp"
#include "bind/tickets.hpp"
#include "shm/group.hpp"
#include "shm/messages.hpp"

namespace ferrodist::bind {

struct SharedGroup {
    explicit SharedGroup(std::shared_ptr<shm::Group> native)
        : group(std::move(native)), messages(*group) {}

    std::shared_ptr<shm::Group> group;
    shm::Messages messages;
    Tickets tickets;
    bool is_open = true;        // takes calls
    bool reproducible = false;  // part of the fingerprint
    std::int64_t timeout_ns = 0;
    core::Patience patience;  // beyond the timeout
    std::size_t fuse_nbytes = 0;  // up to which arrays of a tree travel together
    Progress progress;  // ends before the group does
};

}  // namespace ferrodist::bind
