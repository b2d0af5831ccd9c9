// SPDX-License-Identifier: MIT OR Apache-2.0
// HybridGroup: a group over TCP whose ranks share memory with the others of their host. Touched only with the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bind/shared_group.hpp"
#include "bind/tcp_group.hpp"
#include "hybrid/program.hpp"

namespace ferrodist::bind {

struct HybridGroup {
    HybridGroup(nanobind::handle inter_node, nanobind::handle intra_node, std::vector<int> local_ranks,
                std::uint64_t mismatch_fingerprint)
        : kept{nanobind::borrow(inter_node), nanobind::borrow(intra_node)},
          tcp(nanobind::cast<TcpGroup&>(inter_node)), shared(nanobind::cast<SharedGroup&>(intra_node)),
          local(std::move(local_ranks)), levels{*shared.group, *tcp.group, local, mismatch_fingerprint} {}

    using KeptPlan = std::shared_ptr<const hybrid::Program>;

    nanobind::object kept[2];
    TcpGroup& tcp;
    SharedGroup& shared;
    const std::vector<int> local;
    const hybrid::Levels levels;
    PlanCache<KeptPlan> plans;

    // The calls are those of the group over TCP.
    const std::shared_ptr<net::Group>& group = tcp.group;
    Tickets& tickets = tcp.tickets;
    Progress& progress = tcp.progress;
    const bool& reproducible = tcp.reproducible;
    const std::int64_t& timeout_ns = tcp.timeout_ns;
    const core::Patience& patience = tcp.patience;
    const std::size_t& fuse_nbytes = tcp.fuse_nbytes;
};

}  // namespace ferrodist::bind
