// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/messages.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bind/status.hpp"
#include "bind/buffers.hpp"
#include "bind/call_path.hpp"
#include "bind/convert.hpp"
#include "bind/gil_hook.hpp"
#include "bind/message_array.hpp"
#include "bind/site.hpp"
#include "bind/work.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using core::Messages;
using core::Request;
using core::Status;
using core::StatusCode;

constexpr long largest_tag = std::numeric_limits<std::int32_t>::max();

core::Bytes bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

// Lets go of the GIL for a while, where a lock may be held for long.
template <bool keeps_gil, class Call>
auto without_gil(const Call& call) {
    if constexpr (keeps_gil) {
        return call();
    } else {
        const WithoutGil unlocked;
        return call();
    }
}

// -- what becomes of a call that fails -----------------------------------------------------------------

// How a call ended, and what it found.
struct Failure {
    Status status;
    std::vector<std::byte> found;  // the header of a message that did not fit
    std::vector<int> cycle;        // of sends that wait for each other
    nb::object error;              // that ended a wait
};

// Whom a call is with, as Python is told.
struct Peers {
    static constexpr int none = -1, any_source = -2, any_tag = -1;

    int dst = none, src = none;  // none: it does not send, or not receive
    long tag = 0, recv_tag = 0;

    static Peers of(const Request& request) {
        Peers peers;
        peers.add(request);
        return peers;
    }
    static Peers of(const Request& send, const Request& receive) {
        Peers peers = of(send);
        peers.add(receive);
        return peers;
    }

private:
    void add(const Request& request) {
        if (request.is_send) {
            dst = request.peer;
            tag = static_cast<long>(request.tag);
        } else {
            src = request.takes_any_source ? any_source : request.peer;
            recv_tag = request.takes_any_tag ? any_tag : static_cast<long>(request.tag);
        }
    }
};

// What errors say of a call.
struct MessageFacts {
    Peers peers;
    double timeout = -1;            // in seconds; below 0: none
    core::Bytes expected = {};      // the header of what is to be received
    nb::object site = nb::none();   // None: where this thread is
    const char* waits_in = nullptr;  // the name of a call whose caller waits in it
};

// Has Python make the error of a call.
nb::object make_error(nb::handle backend, const Failure& failure, const MessageFacts& facts) {
    const nb::object cycle = nb::cast(failure.cycle), timeout = facts.timeout < 0 ? nb::none() : nb::cast(facts.timeout);
    const nb::bytes found(failure.found.data(), failure.found.size()), expected(facts.expected.data(), facts.expected.size());
    nb::object made = nb::steal(call_python_with(
        hooks().message_error, "OiiOOOO(iill)OOz", backend.ptr(), static_cast<int>(failure.status.code),
        failure.status.failed_rank, failure.error.is_valid() ? failure.error.ptr() : Py_None, found.ptr(), cycle.ptr(),
        expected.ptr(), facts.peers.dst, facts.peers.src, facts.peers.tag, facts.peers.recv_tag, timeout.ptr(),
        facts.site.ptr(), facts.waits_in));
    return made.is_valid() ? made : throw nb::python_error();
}

// The waits of a call: Python logs those that last, and shows the other ranks what this one is in.
class MessageHook final : public GilHook {
public:
    MessageHook(nb::handle backend, const Peers& peers, nb::handle site)
        : backend_(backend), site_(site), peers_(peers) {}

    // Whom a call of several messages waits for now.
    void turn_to(const Peers& peers) {
        peers_ = peers;
        has_turned_ = true;
    }
    // The call is over: takes the GIL back, and the log is told.
    void end() {
        take_back();
        end_log();
    }

protected:
    bool ask() override {
        // Rarely: a hundred threads may wait at once, and would all run Python code all the time.
        const std::int64_t now = core::now_ns();
        if (now < next_ns_) {
            return true;
        }
        next_ns_ = now + (++num_asked_ < 3 ? 110'000'000 : 500'000'000);
        if (std::exchange(has_turned_, false)) {
            end_log();
        }
        wait_ = nb::steal(call_python_with(hooks().on_message_wait, "OO(iill)O", wait_.is_valid() ? wait_.ptr() : Py_None,
                                           backend_.ptr(), peers_.dst, peers_.src, peers_.tag, peers_.recv_tag,
                                           site_.ptr()));
        return wait_.is_valid();
    }

private:
    void end_log() {
        if (wait_.is_valid() && !nb::steal(call_python(hooks().on_message_wait_end, wait_.ptr())).is_valid()) {
            PyErr_WriteUnraisable(hooks().on_message_wait_end);
        }
        wait_.reset();
    }

    nb::handle backend_, site_;
    Peers peers_;
    bool has_turned_ = false;
    int num_asked_ = 0;
    std::int64_t next_ns_ = 0;
    nb::object wait_;
};

double seconds_of(std::int64_t timeout_ns) { return timeout_ns == 0 ? -1 : static_cast<double>(timeout_ns) / 1e9; }

// -- requests of the general path ------------------------------------------------------------------------

// A request of a call that waits, as Python sees it: holds on to its group and to the memory it names.
class HeldRequest {
public:
    template <class G>
    HeldRequest(nb::handle group, G& self)
        : group_(nb::borrow(group)), messages_(GroupAccess<G>::messages(self)),
          spins_(GroupAccess<G>::spins(self)) {}
    ~HeldRequest() { messages_.abandon(request, {StatusCode::given_up}); }
    HeldRequest(const HeldRequest&) = delete;
    HeldRequest& operator=(const HeldRequest&) = delete;

    // StatusCode, rank and error of the request if it is complete, else of the wait that ended before.
    CallStatus wait(nb::handle deadline, bool holds_caller, nb::handle poll) {
        GilHook hook(poll.is_none() ? nullptr : poll.ptr());
        const Deadline limit(deadline);
        const core::WaitOptions options{&hook, limit.at_ns, spins_, 0, 0, limit.patience};
        hook.let_go();
        const Status status = messages_.wait(request, options, holds_caller);
        hook.take_back();
        return CallStatus(status.failed() ? status : request.status(), hook);
    }
    bool test() {
        const WithoutGil unlocked;
        return messages_.test(request);
    }
    void abandon(int code) { messages_.abandon(request, {static_cast<StatusCode>(code), request.peer}); }

    Request request;
    std::optional<View> view;
    ReceivedArray received;

private:
    nb::object group_;
    Messages& messages_;
    core::Spins* spins_;
};

// What a receive of the general path takes; -1: any source, any tag.
struct Wanted {
    int peer;
    std::int64_t tag;
    bool takes_object, takes_shorter;
};

void require_peer(int peer, int size) {
    if (peer < 0 || peer >= size) {
        throw nb::value_error("no such peer");
    }
}

template <class G>
void set_peer(Request& send, const G& self, int peer, std::uint32_t tag) {
    require_peer(peer, self.group->size());
    send.peer = peer;
    send.tag = tag;
}

template <class G>
void set_wanted(Request& receive, const G& self, const Wanted& wanted) {
    require_peer(std::max(wanted.peer, 0), self.group->size());
    receive.takes_any_source = wanted.peer < 0;
    receive.takes_any_tag = wanted.tag < 0;
    receive.peer = wanted.peer;
    receive.tag = static_cast<std::uint32_t>(std::max<std::int64_t>(wanted.tag, 0));
    receive.takes_object = wanted.takes_object;
    receive.takes_shorter = wanted.takes_shorter;
    receive.keeps_header = true;
}

void set_source(Request& send, const View& view) {
    send.source = static_cast<const std::byte*>(view.data());
    send.nbytes = view.nbytes();
}

// The memory a message goes to, or None: then it says itself what it is.
void set_target(Request& receive, std::optional<View>& view, ReceivedArray& received, core::Bytes header,
                nb::handle target) {
    if (target.is_none()) {
        receive.place = &received;
        return;
    }
    view.emplace(writable(target));
    receive.header.assign(header.begin(), header.end());
    receive.target = static_cast<std::byte*>(view->data());
    receive.nbytes = view->nbytes();
}

template <class G>
std::unique_ptr<HeldRequest> isend(nb::handle group, int peer, std::uint32_t tag, const nb::bytes& header,
                                   nb::handle payload) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = std::make_unique<HeldRequest>(group, self);
    held->view.emplace(readable(payload));
    set_peer(held->request, self, peer, tag);
    set_source(held->request, *held->view);
    without_gil<GroupAccess<G>::keeps_gil>(
        [&] { GroupAccess<G>::messages(self).isend(held->request, bytes_of(header)); });
    return held;
}

template <class G>
std::unique_ptr<HeldRequest> irecv(nb::handle group, const Wanted& wanted, const nb::bytes& header, nb::handle target) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = std::make_unique<HeldRequest>(group, self);
    set_wanted(held->request, self, wanted);
    set_target(held->request, held->view, held->received, bytes_of(header), target);
    without_gil<GroupAccess<G>::keeps_gil>([&] { GroupAccess<G>::messages(self).irecv(held->request); });
    return held;
}

template <class G>
std::unique_ptr<HeldRequest> iprobe(nb::handle group, int peer, std::int64_t tag) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = std::make_unique<HeldRequest>(group, self);
    set_wanted(held->request, self, {peer, tag, false, false});
    held->request.is_probe = true;
    without_gil<GroupAccess<G>::keeps_gil>([&] { GroupAccess<G>::messages(self).irecv(held->request); });
    return held;
}

nb::bytes found_of(const Request& request) { return nb::bytes(request.found.data(), request.found.size()); }

// Source, tag and header of the message that a receive would get; None if there is none.
template <class G>
nb::object peek(G& self, int peer, std::int64_t tag) {
    Request probe;
    set_wanted(probe, self, {peer, tag, false, false});
    Messages& messages = GroupAccess<G>::messages(self);
    const bool is_there = without_gil<false>([&] {
        messages.poll();
        return messages.peek(probe);
    });
    return is_there ? nb::object(nb::make_tuple(probe.found_source, probe.found_tag, found_of(probe))) : nb::none();
}

// -- calls in flight -------------------------------------------------------------------------------------

// What a call in flight holds on to, and what it gives.
struct SendMemory {
    InputArray x;
    nb::object object;
    nb::object result(const Request&) { return nb::none(); }
};

struct ReceiveMemory {
    ReceiveTarget target;
    nb::object result(const Request& request) { return target.finish(request); }
};

// Of a call on the general path, which has converted its arrays already.
struct ConvertedMemory {
    std::optional<View> view;  // none: of a message that says itself what it is
    ReceivedArray received;
    nb::object finish = nb::none();  // makes the result of the array that came, or None, and of what is known of it
    nb::object result(const Request& request) {
        if (finish.is_none()) {
            return nb::none();
        }
        const nb::object array = view ? nb::none() : received.finish();
        const nb::bytes found = found_of(request);
        nb::object made = nb::steal(call_python_with(finish.ptr(), "OiIO", array.ptr(), request.found_source,
                                                     static_cast<unsigned int>(request.found_tag), found.ptr()));
        return made.is_valid() ? made : throw nb::python_error();
    }
};

// What a call in flight knows its backend by: it must not keep one alive that nobody uses any more.
nb::object proxy_of(PyObject* backend) {
    if (PyWeakref_CheckProxy(backend)) {
        return nb::borrow(backend);
    }
    nb::object proxy = nb::steal(PyWeakref_NewProxy(backend, nullptr));
    return proxy.is_valid() ? proxy : throw nb::python_error();
}

template <class G, class Memory>
class MessageInFlight final : public WorkRequest {
public:
    MessageInFlight(nb::handle group, nb::handle backend)
        : self_(*nb::inst_ptr<G>(group)), group_(nb::borrow(group)), backend_(proxy_of(backend.ptr())),
          site_(caller_site()) {
        request.is_unattended = true;
    }
    ~MessageInFlight() override { messages().abandon(request, {StatusCode::given_up}); }

    // Sets when it fails by itself.
    void set_deadline(std::int64_t deadline_ns, std::int64_t timeout_ns, const core::Patience& patience) {
        request.deadline_ns = deadline_ns;
        request.stuck_ns = patience.stuck_ns;
        request.last_deadline_ns = patience.stuck_ns == 0 ? 0 : deadline_ns + patience.longest_ns;
        timeout_ns_ = timeout_ns;
        longest_ns_ = patience.longest_ns;
    }
    Messages& messages() { return GroupAccess<G>::messages(self_); }

    bool is_complete() override { return request.is_complete(); }
    bool test() override {
        const WithoutGil unlocked;
        return messages().test(request);
    }
    nb::object wait(std::int64_t end_ns) override {
        MessageHook hook(backend_, Peers::of(request), site_);
        const core::WaitOptions options{&hook, end_ns, GroupAccess<G>::spins(self_)};
        if (!GroupAccess<G>::keeps_gil) {
            hook.let_go();
        }
        messages().wait(request, options, false);
        hook.end();
        return hook.error();
    }
    bool hear(std::uint64_t token) override {
        return without_gil<GroupAccess<G>::keeps_gil>([&] { return messages().hear_of(request, token); });
    }
    bool has_failed() override { return request.status().failed(); }
    nb::object result() override { return memory.result(request); }
    nb::object error() override {
        const Failure failure{request.status(), request.found, {}, {}};
        const bool was_patient = request.last_deadline_ns != 0 && core::now_ns() >= request.last_deadline_ns;
        const double timeout = seconds_of(timeout_ns_ + (was_patient ? longest_ns_ : 0));
        return make_error(backend_, failure, {Peers::of(request), timeout, request.header, site_});
    }
    void on_interrupt(nb::handle error) override {
        const char* const name = request.is_send ? "send" : "recv";
        if (!nb::steal(call_python_with(hooks().on_message_interrupt, "OsO", backend_.ptr(), name, error.ptr())).is_valid()) {
            throw nb::python_error();
        }
    }
    // A receive that no message has been matched with is withdrawn.
    bool cancel() override {
        return !request.is_send && without_gil<GroupAccess<G>::keeps_gil>([&] {
            return messages().cancel(request, {StatusCode::cancelled});
        });
    }
    nb::object backend() override { return backend_; }
    PyObject* group() const override { return group_.ptr(); }

    Request request;
    Memory memory;

private:
    G& self_;
    nb::object group_, backend_, site_;
    std::int64_t timeout_ns_ = 0, longest_ns_ = 0;  // 0: none
};

CallFacts facts_of(const Peers& peers) {
    return {.dst = peers.dst, .src = peers.src, .number = peers.dst < 0 ? peers.recv_tag : peers.tag};
}

// Posts a send and gives its Work.
template <class G, class Memory>
PyObject* start_send(std::unique_ptr<MessageInFlight<G, Memory>> made, core::Bytes header) {
    MessageInFlight<G, Memory>& call = *made;
    call.request.is_send = true;
    NewWork work(facts_of(Peers::of(call.request)), std::move(made));
    call.request.token = work.token();
    without_gil<GroupAccess<G>::keeps_gil>([&] { call.messages().isend(call.request, header); });
    return call.request.state() == Request::State::done ? work.release_done() : work.release();
}

template <class G, class Memory>
PyObject* start_receive(std::unique_ptr<MessageInFlight<G, Memory>> made) {
    MessageInFlight<G, Memory>& call = *made;
    NewWork work(facts_of(Peers::of(call.request)), std::move(made));
    call.request.token = work.token();
    without_gil<GroupAccess<G>::keeps_gil>([&] { call.messages().irecv(call.request); });
    return work.release();
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
    void on_interrupt(nb::handle error) override { receive_->on_interrupt(error); }
    nb::object backend() override { return receive_->backend(); }
    PyObject* group() const override { return receive_->group(); }

private:
    std::unique_ptr<WorkRequest> send_, receive_;
};

// Posts both and gives their Work.
template <class G, class Memory, class Other>
PyObject* start_sendrecv(std::unique_ptr<MessageInFlight<G, Memory>> send, core::Bytes header,
                         std::unique_ptr<MessageInFlight<G, Other>> receive) {
    Request &outgoing = send->request, &incoming = receive->request;
    Messages& messages = send->messages();
    outgoing.is_send = true;
    NewWork work(facts_of(Peers::of(outgoing, incoming)),
                 std::make_unique<SendrecvInFlight>(std::move(send), std::move(receive)));
    outgoing.token = incoming.token = work.token();
    without_gil<GroupAccess<G>::keeps_gil>([&] {
        messages.isend(outgoing, header);
        messages.irecv(incoming);
    });
    return work.release();
}

template <class Call>
void set_given_deadline(Call& call, nb::handle deadline) {
    const Deadline limit(deadline);
    call.set_deadline(limit.at_ns, limit.at_ns == 0 ? 0 : to_ns(limit.seconds), limit.patience);
}

template <class G>
std::unique_ptr<MessageInFlight<G, ConvertedMemory>> converted_send(nb::handle group, nb::handle backend, int peer,
                                                                    std::uint32_t tag, nb::handle payload,
                                                                    nb::handle deadline) {
    auto call = std::make_unique<MessageInFlight<G, ConvertedMemory>>(group, backend);
    call->memory.view.emplace(readable(payload));
    set_peer(call->request, *nb::inst_ptr<G>(group), peer, tag);
    set_source(call->request, *call->memory.view);
    set_given_deadline(*call, deadline);
    return call;
}

template <class G>
std::unique_ptr<MessageInFlight<G, ConvertedMemory>> converted_receive(nb::handle group, nb::handle backend,
                                                                       const Wanted& wanted, const nb::bytes& header,
                                                                       nb::handle target, nb::handle deadline,
                                                                       nb::object finish) {
    auto call = std::make_unique<MessageInFlight<G, ConvertedMemory>>(group, backend);
    set_wanted(call->request, *nb::inst_ptr<G>(group), wanted);
    set_target(call->request, call->memory.view, call->memory.received, bytes_of(header), target);
    call->memory.finish = std::move(finish);
    set_given_deadline(*call, deadline);
    return call;
}

// -- the fast path: what it takes --------------------------------------------------------------------

// Whether a call may be made; false also where something is known to be wrong. Who sends to itself, or receives
// from itself, must not wait for it.
template <class G>
bool can_call(const Request& request, G& self, bool waits) {
    return (!waits || request.peer != self.group->rank()) && GroupAccess<G>::can_call(self, request.peer);
}

bool read_tag(std::uint32_t& tag, PyObject* object) {
    int overflow = 0;
    const long number = PyLong_CheckExact(object) ? PyLong_AsLongAndOverflow(object, &overflow) : -1;
    tag = static_cast<std::uint32_t>(number);
    return overflow == 0 && number >= 0 && number <= largest_tag;
}

// What is to be sent; false: the general path.
template <class G>
bool read_send(Request& send, G& self, InputArray& x, PyObject* object, PyObject* dst, PyObject* tag, bool waits) {
    if (!read_tag(send.tag, tag) || !read_index(dst, self.group->size(), send.peer) || !can_call(send, self, waits) ||
        !x.read(object)) {
        return false;
    }
    send.source = x.data;
    send.nbytes = x.nbytes;
    return true;
}

// What is to be received, and where it goes; false: the general path.
template <class G>
bool read_receive(Request& receive, G& self, ReceiveTarget& target, PyObject* src, PyObject* out, PyObject* like,
                  PyObject* tag, PyObject* with_status, bool waits) {
    receive.takes_any_source = src == hooks().any_source;
    receive.takes_any_tag = tag == hooks().any_tag;
    const bool is_read = (receive.takes_any_tag || read_tag(receive.tag, tag)) &&
                         (receive.takes_any_source || read_index(src, self.group->size(), receive.peer));
    const bool is_alone = receive.takes_any_source && self.group->size() == 1;
    return is_read && !(waits && is_alone) && can_call(receive, self, waits) &&
           target.read(receive, out, like, PyObject_IsTrue(with_status) > 0);
}

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

// -- the fast path: calls that wait ------------------------------------------------------------------

// A request of a call that waits: whatever is thrown, nothing of it is left behind.
struct OwnRequest : Request {
    explicit OwnRequest(Messages& its_messages) : messages(its_messages) {}
    ~OwnRequest() { messages.abandon(*this, {StatusCode::given_up}); }

    Messages& messages;
};

// One call on the fast path, from its first wait to its result.
template <class G>
class FastCall {
public:
    FastCall(G& self, const char* name, nb::handle backend, const Peers& peers)
        : self_(self), messages_(GroupAccess<G>::messages(self)), name_(name), peers_(peers),
          hook_(backend, peers, Py_None),
          options_{&hook_, 0, GroupAccess<G>::spins(self), 0, self.timeout_ns, self.patience} {
        if constexpr (!GroupAccess<G>::keeps_gil) {
            options_.begin();  // waits there begin with the deadline
        }
    }

    // Whether a request went well; else raise() tells what became of it.
    bool wait(Request& request, bool holds_caller) {
        Status status = messages_.wait(request, options_, holds_caller);
        if (!status.failed() && !request.status().failed()) {
            return true;
        }
        if (!status.failed()) {
            status = request.status();
        }
        failure_.status = status;
        failure_.found = request.found;
        const bool may_be_cycle = holds_caller && request.is_send &&
                                  (status.code == StatusCode::late || status.code == StatusCode::lost);
        if (may_be_cycle) {
            failure_.cycle = GroupAccess<G>::find_send_cycle(self_, request.peer);
        }
        end(request);
        return false;
    }
    void end(Request& request) { messages_.abandon(request, failure_.status); }
    bool has_misfit() const {
        return failure_.status.code == StatusCode::unexpected || failure_.status.code == StatusCode::corrupt ||
               failure_.status.code == StatusCode::other_kind;
    }
    PyObject* raise(PyObject* backend, core::Bytes expected = {}) {
        hook_.end();
        failure_.error = hook_.error();
        const bool was_patient = options_.patience.stuck_ns != 0 && !options_.is_patient();
        const double timeout = seconds_of(options_.timeout_ns + (was_patient ? options_.patience.longest_ns : 0));
        const MessageFacts facts{peers_, timeout, expected, nb::none(), name_};
        const nb::object error = make_error(backend, failure_, facts);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        return nullptr;
    }
    void turn_to(const Request& request) {
        peers_ = Peers::of(request);
        hook_.turn_to(peers_);
    }
    void end() { hook_.end(); }
    Messages& messages() { return messages_; }

private:
    G& self_;
    Messages& messages_;
    const char* name_;
    Peers peers_;
    MessageHook hook_;
    core::WaitOptions options_;
    Failure failure_;
};

// args: backend, x, dst, tag
template <class G>
PyObject* fast_send(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    InputArray x;
    OwnRequest send(GroupAccess<G>::messages(self));
    if (!read_send(send, self, x, args[1], args[2], args[3], true)) {
        return decline();
    }
    if (GroupAccess<G>::keeps_gil && send.nbytes <= core::eager_limit) {
        GroupAccess<G>::messages(self).isend(send, ArrayHeader(x).all());
        if (send.is_complete()) {
            Py_RETURN_NONE;
        }
    }
    send.is_send = true;
    FastCall<G> call(self, "send", args[0], Peers::of(send));
    if (!GroupAccess<G>::keeps_gil || send.nbytes > core::eager_limit) {
        call.messages().isend(send, ArrayHeader(x).all());
    }
    if (!call.wait(send, true)) {
        return call.raise(args[0]);
    }
    call.end();
    Py_RETURN_NONE;
}

// args: backend, src, out, like, tag, with_status
template <class G>
PyObject* fast_recv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    ReceiveTarget target;
    OwnRequest receive(GroupAccess<G>::messages(self));
    if (!read_receive(receive, self, target, args[1], args[2], args[3], args[4], args[5], true)) {
        return decline();
    }
    FastCall<G> call(self, "recv", args[0], Peers::of(receive));
    call.messages().irecv(receive);
    if (!call.wait(receive, false)) {
        return call.raise(args[0], receive.header);
    }
    call.end();
    return target.finish(receive).release().ptr();
}

// args: backend, x, dst, src, out, like, tag, recv_tag
template <class G>
PyObject* fast_sendrecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    InputArray x;
    ReceiveTarget target;
    OwnRequest send(GroupAccess<G>::messages(self)), receive(GroupAccess<G>::messages(self));
    PyObject* const recv_tag = args[7] == Py_None ? args[6] : args[7];
    if (!read_send(send, self, x, args[1], args[2], args[6], true) ||
        !read_receive(receive, self, target, args[3], args[4], args[5], recv_tag, Py_False, true) || target.overlaps(x)) {
        return decline();
    }
    send.is_send = true;
    FastCall<G> call(self, "sendrecv", args[0], Peers::of(send, receive));
    call.messages().isend(send, ArrayHeader(x).all());
    call.messages().irecv(receive);
    // A message that came but does not fit is this rank's own affair: its own goes out. Else it is withdrawn.
    const bool is_received = call.wait(receive, false);
    if (is_received && call.wait(send, false)) {
        call.end();
        return target.finish(receive).release().ptr();
    }
    if (!is_received && call.has_misfit()) {
        call.end();
        FastCall<G> rest(self, "sendrecv", args[0], Peers::of(send));
        rest.wait(send, true);
        rest.end();
    }
    call.end(send);
    call.end(receive);
    return call.raise(args[0], receive.header);
}

// -- the fast path: exchanges between the neighbors of a grid -----------------------------------------

// What goes to a neighbor and what comes from it.
struct NeighborMessages {
    explicit NeighborMessages(Messages& messages) : send(messages), receive(messages) {}

    InputArray x;
    ReceiveTarget target;
    OwnRequest send, receive;
};

// One exchange: everything is posted, then all of it is waited for. Messages of one way have one tag, and come from
// the other side.
template <class G>
class Exchange {
public:
    Exchange(G& self, Py_ssize_t num_ways) : self_(self), ways_(static_cast<std::size_t>(num_ways)) {}

    // False: the general path. `peers` has a rank for each way, or none below 0; `out` is a list or None.
    bool read(PyObject* peers, long first_tag, PyObject* parts, PyObject* out) {
        for (std::size_t way = 0; way < ways_.size(); ++way) {
            const auto place = static_cast<Py_ssize_t>(way);
            const int peer = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(peers, place)));
            if (peer < 0) {
                continue;
            }
            NeighborMessages& one = ways_[way].emplace(GroupAccess<G>::messages(self_));
            one.send.peer = one.receive.peer = peer;
            one.send.tag = static_cast<std::uint32_t>(first_tag + place);
            one.receive.tag = static_cast<std::uint32_t>(first_tag + (place ^ 1));
            PyObject* const room = out == Py_None ? Py_None : PyList_GET_ITEM(out, place);
            if (!GroupAccess<G>::can_call(self_, peer) || !one.x.read(PyList_GET_ITEM(parts, place)) ||
                !one.target.read(one.receive, room, Py_None, false)) {
                return false;
            }
            one.send.source = one.x.data;
            one.send.nbytes = one.x.nbytes;
        }
        return out == Py_None || !has_overlap();
    }

    // New reference: a list of what has come, with None where there is no neighbor.
    PyObject* run(PyObject* backend) {
        FastCall<G> call(self_, "an exchange with neighbors", backend, {});
        for_each([&](NeighborMessages& one) { call.messages().isend(one.send, ArrayHeader(one.x).all()); });
        for_each([&](NeighborMessages& one) { call.messages().irecv(one.receive); });
        // A message that came but does not fit is this rank's own affair: the neighbors get theirs.
        NeighborMessages* misfit = nullptr;
        for (auto& one : ways_) {
            if (one && !wait(call, one->receive)) {
                misfit = &*one;
                if (!call.has_misfit()) {
                    return call.raise(backend, misfit->receive.header);
                }
            }
        }
        for (auto& one : ways_) {
            if (one && !wait(call, one->send)) {
                return call.raise(backend);
            }
        }
        if (misfit != nullptr) {
            call.turn_to(misfit->receive);
            return call.raise(backend, misfit->receive.header);
        }
        call.end();
        return results();
    }

private:
    template <class Act>
    void for_each(const Act& act) {
        for (auto& one : ways_) {
            if (one) {
                act(*one);
            }
        }
    }
    bool wait(FastCall<G>& call, Request& request) {
        call.turn_to(request);
        return call.wait(request, false);
    }
    bool has_overlap() {
        bool found = false;
        for_each([&](NeighborMessages& one) {
            for_each([&](NeighborMessages& other) { found = found || one.target.overlaps(other.x); });
        });
        return found;
    }
    PyObject* results() {
        nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(ways_.size())));
        for (std::size_t way = 0; way < ways_.size(); ++way) {
            nb::object got = ways_[way] ? ways_[way]->target.finish(ways_[way]->receive) : nb::none();
            PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(way), got.release().ptr());
        }
        return list.release().ptr();
    }

    G& self_;
    std::vector<std::optional<NeighborMessages>> ways_;
};

// args: backend, peers, first tag, parts, out
template <class G>
PyObject* fast_exchange(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    const Py_ssize_t num_ways = PyTuple_GET_SIZE(args[1]);
    Exchange<G> exchange(*nb::inst_ptr<G>(self_object), num_ways);
    const bool is_read = exchange.read(args[1], PyLong_AsLong(args[2]), args[3], args[4]);
    return is_read ? exchange.run(args[0]) : decline();
}

// -- the fast path: calls in flight ------------------------------------------------------------------

template <class G, class Memory>
void set_default_deadline(MessageInFlight<G, Memory>& call, const G& self) {
    call.set_deadline(self.timeout_ns == 0 ? 0 : core::now_ns() + self.timeout_ns, self.timeout_ns, self.patience);
}

// args: backend, x, dst, tag
template <class G>
PyObject* fast_isend(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto call = std::make_unique<MessageInFlight<G, SendMemory>>(self_object, args[0]);
    if (!read_send(call->request, self, call->memory.x, args[1], args[2], args[3], false)) {
        return decline();
    }
    call->memory.object = nb::borrow(args[1]);
    set_default_deadline(*call, self);
    const ArrayHeader header(call->memory.x);
    return start_send(std::move(call), header.all());
}

// args: backend, src, out, like, tag, with_status
template <class G>
PyObject* fast_irecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto call = std::make_unique<MessageInFlight<G, ReceiveMemory>>(self_object, args[0]);
    if (!read_receive(call->request, self, call->memory.target, args[1], args[2], args[3], args[4], args[5], false)) {
        return decline();
    }
    set_default_deadline(*call, self);
    return start_receive(std::move(call));
}

// args: backend, x, dst, src, out, like, tag, recv_tag
template <class G>
PyObject* fast_isendrecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto send = std::make_unique<MessageInFlight<G, SendMemory>>(self_object, args[0]);
    auto receive = std::make_unique<MessageInFlight<G, ReceiveMemory>>(self_object, args[0]);
    PyObject* const recv_tag = args[7] == Py_None ? args[6] : args[7];
    if (!read_send(send->request, self, send->memory.x, args[1], args[2], args[6], false) ||
        !read_receive(receive->request, self, receive->memory.target, args[3], args[4], args[5], recv_tag, Py_False, false) ||
        receive->memory.target.overlaps(send->memory.x)) {
        return decline();
    }
    send->memory.object = nb::borrow(args[1]);
    set_default_deadline(*send, self);
    set_default_deadline(*receive, self);
    const ArrayHeader header(send->memory.x);
    return start_sendrecv(std::move(send), header.all(), std::move(receive));
}

template <class G, FastFunction call, Py_ssize_t num_args>
nb::object bind_fast(nb::handle group) {
    static PyMethodDef definition = {"fast", as_function<call, num_args>(), METH_FASTCALL,
                                     "A point-to-point call on one array; NotImplemented sends it the general path."};
    return nb::steal(PyCFunction_New(&definition, group.ptr()));
}

}  // namespace

template <class G>
void add_messages(nb::class_<G>& group) {
    using Access = GroupAccess<G>;
    group
        .def("isend", [](nb::handle self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload) {
            return isend<G>(self, peer, tag, header, payload).release();
        }, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "header"_a, "payload"_a, "Post a send to be waited for.")
        .def("irecv", [](nb::handle self, int peer, std::int64_t tag, const nb::bytes& header, nb::handle target,
                         bool takes_object, bool takes_shorter) {
            return irecv<G>(self, {peer, tag, takes_object, takes_shorter}, header, target).release();
        }, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "header"_a, "target"_a.none(), "takes_object"_a,
             "takes_shorter"_a,
             "Post a receive; without a target it takes whatever comes, -1 is any source or any tag.")
        .def("iprobe", [](nb::handle self, int peer, std::int64_t tag) { return iprobe<G>(self, peer, tag).release(); },
             nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "Post a probe to be waited for.")
        .def("peek", &peek<G>, "peer"_a, "tag"_a,
             "Return source, tag and header of the message that a receive would get, or None.")
        .def("start_send", [](nb::handle self, nb::handle backend, int peer, std::uint32_t tag, const nb::bytes& header,
                              nb::handle payload, nb::handle deadline) {
            auto call = converted_send<G>(self, backend, peer, tag, payload, deadline);
            return nb::steal(start_send(std::move(call), bytes_of(header)));
        }, "backend"_a, "peer"_a, "tag"_a, "header"_a, "payload"_a, "deadline"_a,
             "Post a send and return its Work; it fails by itself at the deadline.")
        .def("start_recv", [](nb::handle self, nb::handle backend, int peer, std::int64_t tag, const nb::bytes& header,
                              nb::handle target, bool takes_object, bool takes_shorter, nb::handle deadline,
                              nb::object finish) {
            return nb::steal(start_receive(converted_receive<G>(
                self, backend, {peer, tag, takes_object, takes_shorter}, header, target, deadline, std::move(finish))));
        }, "backend"_a, "peer"_a, "tag"_a, "header"_a, "target"_a.none(), "takes_object"_a, "takes_shorter"_a,
             "deadline"_a, "finish"_a,
             "Post a receive, as start_send does.\n\nfinish(array or None, source, tag, header) makes the result.")
        .def("start_sendrecv", [](nb::handle self, nb::handle backend, int dst, std::uint32_t tag,
                                  const nb::bytes& sent_header, nb::handle payload, int peer, std::int64_t recv_tag,
                                  const nb::bytes& header, nb::handle target, nb::handle deadline, nb::object finish) {
            auto send = converted_send<G>(self, backend, dst, tag, payload, deadline);
            auto receive = converted_receive<G>(self, backend, {peer, recv_tag, false, false}, header, target, deadline,
                                                std::move(finish));
            return nb::steal(start_sendrecv(std::move(send), bytes_of(sent_header), std::move(receive)));
        }, "backend"_a, "dst"_a, "tag"_a, "sent_header"_a, "payload"_a, "peer"_a, "recv_tag"_a, "header"_a,
             "target"_a.none(), "deadline"_a, "finish"_a, "Post a send and a receive and return the Work of both.")
        .def("unexpected_tags", [](G& self, int peer) {
            const WithoutGil unlocked;
            return Access::messages(self).unexpected_tags(peer);
        }, "peer"_a, "List the tags of messages that have come and nobody received.")
        .def("find_send_cycle", [](G& self, int peer) {
            const WithoutGil unlocked;
            return Access::find_send_cycle(self, peer);
        }, "peer"_a, "Return the cycle of sends that a send is part of, or nothing.")
        .def("set_unexpected_limit", [](G& self, std::uint64_t nbytes) {
            Access::messages(self).set_unexpected_limit(nbytes);
        }, "nbytes"_a, "Bound the bytes of eager messages that a rank may leave unreceived.")
        .def_prop_ro("num_requests", [](G& self) { return Access::messages(self).num_in_flight(); },
                     "How many requests are in flight.")
        .def_prop_ro("fast_send", [](nb::handle self) { return bind_fast<G, &fast_send<G>, 4>(self); },
                     "The fast path of send: (backend, x, dst, tag).")
        .def_prop_ro("fast_exchange", [](nb::handle self) { return bind_fast<G, &fast_exchange<G>, 5>(self); },
                     "An exchange with neighbors: (backend, peers, first tag, parts, list of out or None).")
        .def_prop_ro("fast_recv", [](nb::handle self) { return bind_fast<G, &fast_recv<G>, 6>(self); },
                     "The fast path of recv: (backend, src, out, like, tag, with_status).")
        .def_prop_ro("fast_sendrecv", [](nb::handle self) { return bind_fast<G, &fast_sendrecv<G>, 8>(self); },
                     "The fast path of sendrecv: (backend, x, dst, src, out, like, tag, recv_tag or None).")
        .def_prop_ro("fast_isend", [](nb::handle self) { return bind_fast<G, &fast_isend<G>, 4>(self); },
                     "The fast path of an async send: (backend, x, dst, tag) -> its Work.")
        .def_prop_ro("fast_irecv", [](nb::handle self) { return bind_fast<G, &fast_irecv<G>, 6>(self); },
                     "The fast path of an async recv: as of recv -> its Work.")
        .def_prop_ro("fast_isendrecv", [](nb::handle self) { return bind_fast<G, &fast_isendrecv<G>, 8>(self); },
                     "The fast path of an async sendrecv, as of sendrecv -> its Work.");
}

template void add_messages<SharedGroup>(nb::class_<SharedGroup>& group);
template void add_messages<TcpGroup>(nb::class_<TcpGroup>& group);

void add_requests(nb::module_& module) {
    nb::class_<HeldRequest>(module, "Request", "A send or receive that is waited for.")
        .def("wait", &HeldRequest::wait, "deadline"_a, "holds_caller"_a, "poll"_a.none(),
             "Wait until it is complete; return a status.")
        .def("test", &HeldRequest::test, "Make progress and tell whether it is complete.")
        .def("abandon", &HeldRequest::abandon, "code"_a, "End it, whatever has become of it.")
        .def("array", [](HeldRequest& self) { return self.received.finish(); },
             "Return the array that came where there was no target; once, when it is complete.")
        .def_prop_ro("source", [](const HeldRequest& self) { return self.request.found_source; }, "Whose message came.")
        .def_prop_ro("tag", [](const HeldRequest& self) { return self.request.found_tag; }, "The tag of what came.")
        .def_prop_ro("found", [](const HeldRequest& self) { return found_of(self.request); },
                     "The header of the message that came, or did not fit.");
}

}  // namespace ferrodist::bind
