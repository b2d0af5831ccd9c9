// SPDX-License-Identifier: MIT OR Apache-2.0
// Point-to-point calls for Python, the same for all groups: requests of calls that wait, calls in flight, and what
// becomes of those that fail. The fast path of calls on plain arrays is in fast_messages.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bind/groups.hpp"
#include "bind/hooks.hpp"
#include "bind/message_array.hpp"
#include "bind/wait.hpp"
#include "bind/work.hpp"
#include "core/messages.hpp"

namespace ferrodist::bind {

// Does what takes the lock of a group's messages: without the GIL, where it may be held for long.
template <class Call>
auto with_messages(const MessageGroup& group, const Call& call) {
    return group.keeps_gil ? call() : without_gil(call);
}

// How a call ended, and what it found.
struct Failure {
    core::Status status;
    std::vector<std::byte> found;  // the header of a message that did not fit
    std::vector<int> cycle;        // of sends that wait for each other
};

// Whom a call is with, as Python is told.
struct Peers {
    static constexpr int none = -1, any_source = -2, any_tag = -1;

    Peers() = default;
    template <class... Requests>
    explicit Peers(const Requests&... requests) {
        (add(requests), ...);
    }

    int dst = none, src = none;  // none: it does not send, or not receive
    long tag = 0, recv_tag = 0;

private:
    void add(const core::Request& request);
};

// What errors say of a call.
struct MessageFacts {
    Peers peers;
    std::int64_t timeout_ns = 0;  // 0: none
    Bytes expected = {};          // the header of what is to be received
    nanobind::object site = nanobind::none();  // None: where this thread is
};

// Has Python make the error of a call.
nanobind::object make_error(nanobind::handle backend, const Failure& failure, const MessageFacts& facts);

// Aborts the group if a call ends with an error that is not ferrodist's: Ctrl-C, say. Gives the error to raise.
nanobind::object abort_if_foreign(nanobind::handle backend, const char* name, nanobind::object error);

// The waits of a call: Python logs those that last, and shows the other ranks what this one is in.
class MessageHook final : public GilHook {
public:
    MessageHook(nanobind::handle backend, const Peers& peers, nanobind::handle site)
        : backend_(backend), site_(site), peers_(peers) {}
    ~MessageHook() override { take_back(); }  // before a Python object below goes

    // Whom a call of several messages waits for now.
    void turn_to(const Peers& peers) {
        peers_ = peers;
        has_turned_ = true;
    }
    // The call is over: takes the GIL back, and ends what Python shows of the wait. error() may be one of that.
    void end() {
        take_back();
        end_log();
    }

protected:
    bool ask() override;

private:
    void end_log();

    nanobind::handle backend_, site_;
    Peers peers_;
    bool has_turned_ = false;
    int num_asked_ = 0;
    std::int64_t next_ns_ = 0;
    nanobind::object wait_;
};

// A call in flight. What derives from it holds on to its memory, and makes its result.
class MessageInFlight : public WorkRequest {
public:
    MessageInFlight(nanobind::handle group, nanobind::handle backend);

    // Sets when it fails by itself.
    void set_deadline(std::int64_t deadline_ns, std::int64_t timeout_ns, const core::Patience& patience);

    bool is_complete() override { return request.is_complete(); }
    bool test() override;
    nanobind::object wait(std::int64_t end_ns) override;
    bool hear(std::uint64_t token) override;
    bool has_failed() override { return request.status().failed(); }
    nanobind::object error() override;
    nanobind::object on_interrupt(nanobind::object error) override;
    bool cancel() override;
    nanobind::object backend() override { return backend_; }
    PyObject* group() const override { return group_.ptr(); }

    MessageGroup& self;
    core::Request request;

protected:
    // At the end of what derives from it: nothing of its memory is touched any more.
    void abandon() { self.messages().abandon(request, {core::StatusCode::given_up}); }

private:
    nanobind::object group_, backend_, site_;
    std::int64_t timeout_ns_ = 0, longest_ns_ = 0;  // 0: none
};

// Each posts what it is given, and gives its Work.
PyObject* start_send(std::unique_ptr<MessageInFlight> call, Bytes header);
PyObject* start_receive(std::unique_ptr<MessageInFlight> call);
PyObject* start_sendrecv(std::unique_ptr<MessageInFlight> send, Bytes header, std::unique_ptr<MessageInFlight> receive);

// Add what the general path calls, and the fast path of calls on plain arrays.
void add_messages(nanobind::class_<MessageGroup, NativeGroup>& group);
void add_fast_messages(nanobind::class_<MessageGroup, NativeGroup>& group);

}  // namespace ferrodist::bind
