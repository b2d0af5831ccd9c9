// SPDX-License-Identifier: MIT OR Apache-2.0
// Point-to-point calls for Python: requests, and the fast path of calls on plain arrays. The same for all
// groups: a transport is known here only by what GroupAccess says of it.
#pragma once

#include <nanobind/nanobind.h>

#include <limits>
#include <vector>

#include "bind/hooks.hpp"
#include "bind/shared_group.hpp"
#include "bind/tcp_group.hpp"
#include "core/messages.hpp"

namespace ferrodist::bind {

// What messages need of a group as Python sees it.
template <class G>
struct GroupAccess;

template <>
struct GroupAccess<SharedGroup> {
    static constexpr bool keeps_gil = true;  // its lock is held for moments only
    static core::Messages& messages(SharedGroup& self) { return self.messages; }
    static core::Spins* spins(const SharedGroup& self) { return self.group->spins(); }
    static std::vector<int> find_send_cycle(SharedGroup& self, int peer) { return self.messages.find_send_cycle(peer); }
    // Whether a call with a rank (-1: any) may be made from this thread, and nothing is known to be wrong.
    static bool can_call(SharedGroup& self, int peer) {
        const shm::Group& group = *self.group;
        return self.is_open && !is_progress_thread() && !group.world().is_of_ancestor() && !group.has_left() &&
               !group.has_error(std::numeric_limits<std::uint64_t>::max()) && (peer < 0 || !group.has_left(peer));
    }
};

template <>
struct GroupAccess<TcpGroup> {
    static constexpr bool keeps_gil = false;
    static core::Messages& messages(TcpGroup& self) { return self.group->messages(); }
    static core::Spins* spins(const TcpGroup& self) { return self.group->mesh().spins(); }
    static std::vector<int> find_send_cycle(TcpGroup& self, int peer) { return self.group->find_send_cycle(peer); }
    static bool can_call(TcpGroup& self, int peer) {
        net::Group& group = *self.group;
        if (!self.is_open || is_progress_thread() || group.mesh().is_of_ancestor()) {
            return false;
        }
        const net::Lock guard = group.mesh().lock();
        const bool is_other = peer >= 0 && peer != group.rank();
        return !group.has_left(group.rank()) && !(is_other && group.is_gone(peer)) &&
               group.find_error(std::numeric_limits<std::uint64_t>::max()) == nullptr;
    }
};

// Adds the methods for messages to the class of a group.
template <class G>
void add_messages(nanobind::class_<G>& group);
extern template void add_messages<SharedGroup>(nanobind::class_<SharedGroup>& group);
extern template void add_messages<TcpGroup>(nanobind::class_<TcpGroup>& group);

// Adds what is the same for all groups.
void add_requests(nanobind::module_& module);

}  // namespace ferrodist::bind
