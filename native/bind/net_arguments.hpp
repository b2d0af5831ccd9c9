// SPDX-License-Identifier: MIT OR Apache-2.0
// What calls over TCP are given by Python, checked.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/status.hpp"
#include "bind/buffers.hpp"
#include "bind/gil_hook.hpp"
#include "bind/tcp_group.hpp"

namespace ferrodist::bind {

using net::Bytes;

inline Bytes bytes_of(const View& view) { return {static_cast<const std::byte*>(view.data()), view.nbytes()}; }

inline Bytes bytes_of(const nanobind::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

inline void require(bool is_right, const char* problem) {
    if (!is_right) {
        throw nanobind::value_error(problem);
    }
}

inline void require_peer(const TcpGroup& self, int peer) {
    require(peer >= 0 && peer < self.group->size() && peer != self.group->rank(), "no such peer");
}

inline void require_rank(const TcpGroup& self, int rank) {
    require(rank >= 0 && rank < self.group->size(), "no such rank");
}

inline core::WaitOptions options_of(const TcpGroup& self, GilHook& hook, const Deadline& deadline, bool in_background) {
    core::Spins* const spins = in_background ? core::no_spins : self.group->mesh().spins();
    return {&hook, deadline.at_ns, spins, 0, 0, deadline.patience};
}

}  // namespace ferrodist::bind
