// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/messages.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {

using core::Messages;
using core::Request;
using core::Status;
using core::StatusCode;

// -- what becomes of a call that fails -----------------------------------------------------------------

void Peers::add(const Request& request) {
    if (request.is_send) {
        dst = request.peer;
        tag = static_cast<long>(request.tag);
    } else {
        src = request.takes_any_source ? any_source : request.peer;
        recv_tag = request.takes_any_tag ? any_tag : static_cast<long>(request.tag);
    }
}

nb::object make_error(nb::handle backend, const Failure& failure, const MessageFacts& facts) {
    const nb::object cycle = nb::cast(failure.cycle),
                     timeout = facts.timeout_ns == 0 ? nb::none() : nb::cast(static_cast<double>(facts.timeout_ns) / 1e9);
    const nb::bytes found(failure.found.data(), failure.found.size()), expected(facts.expected.data(), facts.expected.size());
    return call_python_with(
        hooks().message_error, "OiiOOO(iill)OO", backend.ptr(), static_cast<int>(failure.status.code),
        failure.status.failed_rank, found.ptr(), cycle.ptr(), expected.ptr(), facts.peers.dst, facts.peers.src, facts.peers.tag, facts.peers.recv_tag, timeout.ptr(),
        facts.site.ptr());
}

nb::object abort_if_foreign(nb::handle backend, const char* name, nb::object error) {
    return insist(std::move(error), [&](PyObject* so_far) {
        return try_python_with(hooks().on_message_interrupt, "OsO", backend.ptr(), name, so_far);
    });
}

bool MessageHook::ask() {
    // Rarely: a hundred threads may wait at once, and would all run Python code all the time.
    const std::int64_t now = core::now_ns();
    if (now < next_ns_) {
        return true;
    }
    next_ns_ = now + (++num_asked_ < 3 ? 110'000'000 : 500'000'000);
    if (std::exchange(has_turned_, false)) {
        end_log();
    }
    wait_ = nb::steal(try_python_with(hooks().on_message_wait, "OO(iill)O", wait_.is_valid() ? wait_.ptr() : Py_None,
                                      backend_.ptr(), peers_.dst, peers_.src, peers_.tag, peers_.recv_tag, site_.ptr()));
    return wait_.is_valid();
}

void MessageHook::end_log() {
    if (wait_.is_valid() && !nb::steal(call_python(hooks().on_message_wait_end, wait_.ptr())).is_valid()) {
        keep_error();
    }
    wait_.reset();
}

// -- calls in flight -------------------------------------------------------------------------------------

namespace {

// What a call in flight knows its backend by: it must not keep one alive that nobody uses any more.
nb::object proxy_of(PyObject* backend) {
    return PyWeakref_CheckProxy(backend) ? nb::borrow(backend) : checked(PyWeakref_NewProxy(backend, nullptr));
}

}  // namespace

MessageInFlight::MessageInFlight(nb::handle group, nb::handle backend)
    : self(*nb::inst_ptr<MessageGroup>(group)), group_(nb::borrow(group)), backend_(proxy_of(backend.ptr())),
      site_(caller_site()) {
    request.is_unattended = true;
}

void MessageInFlight::set_deadline(std::int64_t deadline_ns, std::int64_t timeout_ns, const core::Patience& patience) {
    request.deadline_ns = deadline_ns;
    request.stuck_ns = patience.stuck_ns;
    request.last_deadline_ns = patience.stuck_ns == 0 ? 0 : deadline_ns + patience.longest_ns;
    timeout_ns_ = timeout_ns;
    longest_ns_ = patience.longest_ns;
}

bool MessageInFlight::test() {
    return without_gil([&] { return self.messages().test(request); });
}

nb::object MessageInFlight::wait(std::int64_t end_ns) {
    MessageHook hook(backend_, Peers(request), site_);
    const core::WaitOptions options{&hook, end_ns, self.spins};
    if (!self.keeps_gil) {
        hook.let_go();
    }
    self.messages().wait(request, options, false);
    hook.end();
    return hook.error();
}

bool MessageInFlight::hear(std::uint64_t token) {
    return with_messages(self, [&] { return self.messages().hear_of(request, token); });
}

nb::object MessageInFlight::error() {
    const bool was_patient = request.last_deadline_ns != 0 && core::now_ns() >= request.last_deadline_ns;
    return make_error(backend_, {request.status(), request.found, {}},
                      {Peers(request), timeout_ns_ + (was_patient ? longest_ns_ : 0), request.header, site_});
}

nb::object MessageInFlight::on_interrupt(nb::object error) {
    return abort_if_foreign(backend_, request.is_send ? "send" : "recv", std::move(error));
}

// A receive that no message has been matched with is withdrawn.
bool MessageInFlight::cancel() {
    return !request.is_send &&
           with_messages(self, [&] { return self.messages().cancel(request, {StatusCode::cancelled}); });
}

namespace {

CallFacts facts_of(const Peers& peers) {
    return {.dst = peers.dst, .src = peers.src, .number = peers.dst < 0 ? peers.recv_tag : peers.tag};
}

// A send and a receive that are one call: over when both are, and what the receive gives is its result.
class SendrecvInFlight final : public WorkRequest {
public:
    SendrecvInFlight(std::unique_ptr<WorkRequest> send, std::unique_ptr<WorkRequest> receive)
        : send_(std::move(send)), receive_(std::move(receive)) {}

    bool is_complete() override { return receive_->is_complete() && send_->is_complete(); }
    bool test() override { return receive_->test() && send_->test(); }
    nb::object wait(std::int64_t end_ns) override {
        nb::object error = receive_->wait(end_ns);
        return error.is_valid() || !receive_->is_complete() ? error : send_->wait(end_ns);
    }
    // Of the one that is not over; when it is, the other may be asked for.
    bool hear(std::uint64_t token) override { return receive_->hear(token) || send_->hear(token); }
    bool has_failed() override { return receive_->has_failed() || send_->has_failed(); }
    nb::object result() override { return receive_->result(); }
    nb::object error() override { return receive_->has_failed() ? receive_->error() : send_->error(); }
    nb::object on_interrupt(nb::object error) override { return receive_->on_interrupt(std::move(error)); }
    nb::object backend() override { return receive_->backend(); }
    PyObject* group() const override { return receive_->group(); }
    int traverse(visitproc visit, void* arg) const override {
        const int stopped = send_->traverse(visit, arg);
        return stopped != 0 ? stopped : receive_->traverse(visit, arg);
    }

private:
    std::unique_ptr<WorkRequest> send_, receive_;
};

}  // namespace

PyObject* start_send(std::unique_ptr<MessageInFlight> made, Bytes header) {
    MessageInFlight& call = *made;
    start_or_raise([&] { call.self.messages().start_progress(); });
    call.request.is_send = true;
    NewWork work(facts_of(Peers(call.request)), std::move(made));
    call.request.token = work.token();
    with_messages(call.self, [&] { call.self.messages().isend(call.request, header); });
    return call.request.state() == Request::State::done ? work.release_done() : work.release();
}

PyObject* start_receive(std::unique_ptr<MessageInFlight> made) {
    MessageInFlight& call = *made;
    start_or_raise([&] { call.self.messages().start_progress(); });
    NewWork work(facts_of(Peers(call.request)), std::move(made));
    call.request.token = work.token();
    with_messages(call.self, [&] { call.self.messages().irecv(call.request); });
    return work.release();
}

PyObject* start_sendrecv(std::unique_ptr<MessageInFlight> send, Bytes header, std::unique_ptr<MessageInFlight> receive) {
    Request &outgoing = send->request, &incoming = receive->request;
    MessageGroup& group = send->self;
    start_or_raise([&] { group.messages().start_progress(); });
    outgoing.is_send = true;
    NewWork work(facts_of(Peers(outgoing, incoming)),
                 std::make_unique<SendrecvInFlight>(std::move(send), std::move(receive)));
    outgoing.token = incoming.token = work.token();
    with_messages(group, [&] {
        group.messages().isend(outgoing, header);
        group.messages().irecv(incoming);
    });
    return work.release();
}

// -- the general path: calls whose arrays Python has converted --------------------------------------------

namespace {

nb::bytes found_of(const Request& request) { return nb::bytes(request.found.data(), request.found.size()); }

// What a receive of the general path takes; -1: any source, any tag.
struct Wanted {
    int peer;
    std::int64_t tag;
    bool takes_object, takes_shorter;
};

void require_peer(const MessageGroup& self, int peer) { require(peer >= 0 && peer < self.size, "no such peer"); }

// The memory of a request.
struct ConvertedMemory {
    View view;  // none: of a message that says itself what it is
    ReceivedArray received;

    void set_send(Request& send, const MessageGroup& self, int peer, std::uint32_t tag, nb::handle payload) {
        require_peer(self, peer);
        send.peer = peer;
        send.tag = tag;
        view = readable(payload);
        send.source = view.data();
        send.nbytes = view.nbytes();
    }

    // The memory a message goes to, or None: then it says itself what it is.
    void set_receive(Request& receive, const MessageGroup& self, const Wanted& wanted, const nb::bytes& header,
                     nb::handle target) {
        set_wanted(receive, self, wanted);
        if (target.is_none()) {
            receive.place = &received;
            return;
        }
        view = writable(target);
        receive.header.assign(bytes_of(header).begin(), bytes_of(header).end());
        receive.target = view.data();
        receive.nbytes = view.nbytes();
    }

    static void set_wanted(Request& receive, const MessageGroup& self, const Wanted& wanted) {
        require_peer(self, std::max(wanted.peer, 0));
        receive.takes_any_source = wanted.peer < 0;
        receive.takes_any_tag = wanted.tag < 0;
        receive.peer = wanted.peer;
        receive.tag = static_cast<std::uint32_t>(std::max<std::int64_t>(wanted.tag, 0));
        receive.takes_object = wanted.takes_object;
        receive.takes_shorter = wanted.takes_shorter;
        receive.keeps_header = true;
    }
};

// A request of a call that waits, as Python sees it: holds on to its group and to the memory it names.
class HeldRequest : core::NonCopyable {
public:
    explicit HeldRequest(nb::handle group) : self(*nb::inst_ptr<MessageGroup>(group)), group_(nb::borrow(group)) {}
    ~HeldRequest() { self.messages().abandon(request, {StatusCode::given_up}); }

    // StatusCode, rank and error of the request if it is complete, else of the wait that ended before.
    CallStatus wait(nb::handle deadline, bool holds_caller, nb::handle poll) {
        return wait_without_gil({deadline, false, poll}, self.spins, 0, [&](const core::WaitOptions& options) {
            const Status status = self.messages().wait(request, options, holds_caller);
            return status.failed() ? status : request.status();
        });
    }
    bool test() {
        return without_gil([&] { return self.messages().test(request); });
    }
    void abandon(int code) { self.messages().abandon(request, {static_cast<StatusCode>(code), request.peer}); }

    MessageGroup& self;
    Request request;
    ConvertedMemory memory;

private:
    nb::object group_;
};

HeldRequest* isend(nb::handle group, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload) {
    auto held = std::make_unique<HeldRequest>(group);
    held->memory.set_send(held->request, held->self, peer, tag, payload);
    with_messages(held->self, [&] { held->self.messages().isend(held->request, bytes_of(header)); });
    return held.release();
}

HeldRequest* irecv(nb::handle group, int peer, std::int64_t tag, const nb::bytes& header, nb::handle target,
                   bool takes_object, bool takes_shorter) {
    auto held = std::make_unique<HeldRequest>(group);
    held->memory.set_receive(held->request, held->self, {peer, tag, takes_object, takes_shorter}, header, target);
    with_messages(held->self, [&] { held->self.messages().irecv(held->request); });
    return held.release();
}

HeldRequest* iprobe(nb::handle group, int peer, std::int64_t tag) {
    auto held = std::make_unique<HeldRequest>(group);
    ConvertedMemory::set_wanted(held->request, held->self, {peer, tag, false, false});
    held->request.is_probe = true;
    with_messages(held->self, [&] { held->self.messages().irecv(held->request); });
    return held.release();
}

// Source, tag and header of the message that a receive would get; None if there is none.
nb::object peek(MessageGroup& self, int peer, std::int64_t tag) {
    Request probe;
    ConvertedMemory::set_wanted(probe, self, {peer, tag, false, false});
    const bool is_there = without_gil([&] {
        self.messages().poll();
        return self.messages().peek(probe);
    });
    return is_there ? nb::object(nb::make_tuple(probe.found_source, probe.found_tag, found_of(probe))) : nb::none();
}

class ConvertedInFlight final : public MessageInFlight {
public:
    ConvertedInFlight(nb::handle group, nb::handle backend, nb::handle deadline) : MessageInFlight(group, backend) {
        const Deadline limit(deadline);
        set_deadline(limit.at_ns, limit.at_ns == 0 ? 0 : to_ns(limit.seconds), limit.patience);
    }
    ~ConvertedInFlight() override { abandon(); }

    nb::object result() override {
        if (finish.is_none()) {
            return nb::none();
        }
        const nb::object array = request.place == nullptr ? nb::none() : memory.received.finish();
        return call_python_with(finish.ptr(), "OiIO", array.ptr(), request.found_source,
                                static_cast<unsigned int>(request.found_tag), found_of(request).ptr());
    }
    int traverse(visitproc visit, void* arg) const override {
        Py_VISIT(finish.ptr());
        return 0;
    }

    ConvertedMemory memory;
    nb::object finish = nb::none();  // makes the result of the array that came, or None, and of what is known of it
};

std::unique_ptr<ConvertedInFlight> converted_send(nb::handle group, nb::handle backend, int peer, std::uint32_t tag,
                                                  nb::handle payload, nb::handle deadline) {
    auto call = std::make_unique<ConvertedInFlight>(group, backend, deadline);
    call->memory.set_send(call->request, call->self, peer, tag, payload);
    return call;
}

std::unique_ptr<ConvertedInFlight> converted_receive(nb::handle group, nb::handle backend, const Wanted& wanted,
                                                     const nb::bytes& header, nb::handle target, nb::handle deadline,
                                                     nb::object finish) {
    auto call = std::make_unique<ConvertedInFlight>(group, backend, deadline);
    call->memory.set_receive(call->request, call->self, wanted, header, target);
    call->finish = std::move(finish);
    return call;
}

}  // namespace

void add_requests(nb::module_& module) {
    nb::class_<HeldRequest>(module, "Request", "A send or receive that is waited for.")
        .def("wait", &HeldRequest::wait, "deadline"_a, "holds_caller"_a, "poll"_a.none(),
             "Wait until it is complete; return a status.")
        .def("test", &HeldRequest::test, "Make progress and tell whether it is complete.")
        .def("abandon", &HeldRequest::abandon, "code"_a, "End it, whatever has become of it.")
        .def("array", [](HeldRequest& self) { return self.memory.received.finish(); },
             "Return the array that came where there was no target; once, when it is complete.")
        .def_prop_ro("source", [](const HeldRequest& self) { return self.request.found_source; }, "Whose message came.")
        .def_prop_ro("tag", [](const HeldRequest& self) { return self.request.found_tag; }, "The tag of what came.")
        .def_prop_ro("found", [](const HeldRequest& self) { return found_of(self.request); },
                     "The header of the message that came, or did not fit.");
}

void add_messages(nb::class_<MessageGroup, NativeGroup>& group) {
    group
        .def("isend", &isend, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "header"_a, "payload"_a,
             "Post a send to be waited for.")
        .def("irecv", &irecv, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "header"_a, "target"_a.none(),
             "takes_object"_a, "takes_shorter"_a,
             "Post a receive; without a target it takes whatever comes, -1 is any source or any tag.")
        .def("iprobe", &iprobe, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "Post a probe to be waited for.")
        .def("peek", &peek, "peer"_a, "tag"_a,
             "Return source, tag and header of the message that a receive would get, or None.")
        .def("start_send", [](nb::handle self, nb::handle backend, int peer, std::uint32_t tag, const nb::bytes& header,
                              nb::handle payload, nb::handle deadline) {
            return nb::steal(start_send(converted_send(self, backend, peer, tag, payload, deadline), bytes_of(header)));
        }, "backend"_a, "peer"_a, "tag"_a, "header"_a, "payload"_a, "deadline"_a,
             "Post a send and return its Work; it fails by itself at the deadline.")
        .def("start_recv", [](nb::handle self, nb::handle backend, int peer, std::int64_t tag, const nb::bytes& header,
                              nb::handle target, bool takes_object, bool takes_shorter, nb::handle deadline,
                              nb::object finish) {
            return nb::steal(start_receive(converted_receive(
                self, backend, {peer, tag, takes_object, takes_shorter}, header, target, deadline, std::move(finish))));
        }, "backend"_a, "peer"_a, "tag"_a, "header"_a, "target"_a.none(), "takes_object"_a, "takes_shorter"_a,
             "deadline"_a, "finish"_a,
             "Post a receive, as start_send does.\n\nfinish(array or None, source, tag, header) makes the result.")
        .def("start_sendrecv", [](nb::handle self, nb::handle backend, int dst, std::uint32_t tag,
                                  const nb::bytes& sent_header, nb::handle payload, int peer, std::int64_t recv_tag,
                                  const nb::bytes& header, nb::handle target, bool takes_object, bool takes_shorter,
                                  nb::handle deadline, nb::object finish) {
            auto send = converted_send(self, backend, dst, tag, payload, deadline);
            auto receive = converted_receive(self, backend, {peer, recv_tag, takes_object, takes_shorter}, header,
                                             target, deadline, std::move(finish));
            return nb::steal(start_sendrecv(std::move(send), bytes_of(sent_header), std::move(receive)));
        }, "backend"_a, "dst"_a, "tag"_a, "sent_header"_a, "payload"_a, "peer"_a, "recv_tag"_a, "header"_a,
             "target"_a.none(), "takes_object"_a, "takes_shorter"_a, "deadline"_a, "finish"_a,
             "Post a send and a receive and return the Work of both.")
        .def("unexpected_tags", [](MessageGroup& self, int peer) {
            return without_gil([&] { return self.messages().unexpected_tags(peer); });
        }, "peer"_a, "List the tags of messages that have come and nobody received.")
        .def("find_send_cycle", [](MessageGroup& self, int peer) {
            return without_gil([&] { return self.find_send_cycle(peer); });
        }, "peer"_a, "Return the cycle of sends that a send is part of, or nothing.")
        .def("set_unexpected_limit", [](MessageGroup& self, std::uint64_t nbytes) {
            self.messages().set_unexpected_limit(nbytes);
        }, "nbytes"_a, "Bound the bytes of eager messages that a rank may leave unreceived.")
        .def_prop_ro("num_requests", [](MessageGroup& self) { return self.messages().num_in_flight(); },
                     "How many requests are in flight.");
}

}  // namespace ferrodist::bind
