// SPDX-License-Identifier: MIT OR Apache-2.0
// TcpGroup: a group over TCP as Python sees it, and the order of its calls. Touched only with the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "bind/plan_cache.hpp"
#include "bind/progress.hpp"
#include "bind/tickets.hpp"
#include "net/group.hpp"
#include "net/plan.hpp"

namespace ferrodist::bind {

struct TcpGroup {
    explicit TcpGroup(std::shared_ptr<net::Group> native) : group(std::move(native)) {}

    struct KeptPlan {
        std::shared_ptr<net::Plan> plan;
        bool is_alias_safe;
    };

    std::shared_ptr<net::Group> group;
    Tickets tickets;
    PlanCache<KeptPlan> plans;
    bool is_open = true;        // takes calls
    bool reproducible = false;  // part of the fingerprint
    std::int64_t timeout_ns = 0;
    core::Patience patience;  // beyond the timeout
    std::size_t fuse_nbytes = 0;  // up to which arrays of a tree travel together
    Progress progress;  // ends before the group does
};

}  // namespace ferrodist::bind
