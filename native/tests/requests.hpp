// SPDX-License-Identifier: MIT OR Apache-2.0
// Sends and receives of tests, over any transport.
#pragma once

#include <memory>

#include "core/memory.hpp"
#include "core/messages.hpp"
#include "ranks.hpp"
#include "wires.hpp"

namespace ferrodist::tests {

// Ends a request before its memory goes.
struct Abandon {
    core::Messages* messages;
    void operator()(core::Request* request) const {
        messages->abandon(*request, {core::StatusCode::given_up});
        delete request;
    }
};
using Posted = std::unique_ptr<core::Request, Abandon>;

inline Posted isend(core::Messages& messages, int peer, std::uint32_t tag, core::Bytes content,
                    core::Bytes header = {}) {
    Posted send(new core::Request, {&messages});
    send->peer = peer;
    send->tag = tag;
    send->source = content.data();
    send->nbytes = content.size();
    messages.isend(*send, header);
    return send;
}

inline Posted irecv(core::Messages& messages, int peer, std::uint32_t tag, Buffer& into, core::Bytes header = {},
                    std::int64_t timeout_ns = 0) {
    Posted receive(new core::Request, {&messages});
    receive->peer = peer;
    receive->tag = tag;
    receive->target = into.data();
    receive->nbytes = into.size();
    receive->header.assign(header.begin(), header.end());
    receive->is_unattended = true;
    receive->deadline_ns = timeout_ns == 0 ? 0 : core::now_ns() + timeout_ns;
    messages.irecv(*receive);
    return receive;
}

// How a request ended, or why the wait for it did.
inline core::Status wait_for(core::Messages& messages, core::Request& request, std::int64_t timeout_ns = very_long,
                             bool holds_caller = true) {
    core::ProgressHook hook;
    const core::WaitOptions options{&hook, core::now_ns() + timeout_ns, core::no_spins};
    const core::Status status = messages.wait(request, options, holds_caller);
    return status.failed() ? status : request.status();
}

// While it lives there is no memory for messages that nobody has asked for yet.
class NoMemory {
public:
    // Relaxed, both: pairs with the load in require_memory, which may as well come a little later.
    NoMemory() {
        core::has_memory.store([](std::size_t) { return false; }, std::memory_order_relaxed);
    }
    ~NoMemory() { core::has_memory.store(nullptr, std::memory_order_relaxed); }
    NoMemory(const NoMemory&) = delete;
    NoMemory& operator=(const NoMemory&) = delete;
};

// A receive that is withdrawn when it takes too long.
inline core::Status receive(core::Messages& messages, int peer, std::uint32_t tag, Buffer& into,
                            core::Bytes header = {}, std::int64_t timeout_ns = very_long, Buffer* found = nullptr) {
    const Posted request = irecv(messages, peer, tag, into, header);
    const core::Status status = wait_for(messages, *request, timeout_ns);
    if (found != nullptr && status.code == core::StatusCode::unexpected) {
        *found = request->found;
    }
    return status;
}

}  // namespace ferrodist::tests
