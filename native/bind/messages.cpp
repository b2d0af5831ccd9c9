// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/messages.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

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

// What errors say of a call.
struct MessageFacts {
    int dst = -1, src = -1;  // -1: it does not send, or not receive
    std::uint32_t tag = 0;
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
        hooks().message_error, "OiiOOOOiiIOOz", backend.ptr(), static_cast<int>(failure.status.code),
        failure.status.failed_rank, failure.error.is_valid() ? failure.error.ptr() : Py_None, found.ptr(), cycle.ptr(),
        expected.ptr(), facts.dst, facts.src, static_cast<unsigned int>(facts.tag), timeout.ptr(), facts.site.ptr(),
        facts.waits_in));
    return made.is_valid() ? made : throw nb::python_error();
}

// The waits of a call: Python logs those that last, and shows the other ranks what this one is in.
class MessageHook final : public GilHook {
public:
    MessageHook(nb::handle backend, int dst, int src, std::uint32_t tag, nb::handle site)
        : backend_(backend), site_(site), dst_(dst), src_(src), tag_(tag) {}

    // The call is over: takes the GIL back, and the log is told.
    void end() {
        take_back();
        if (wait_.is_valid() && !nb::steal(call_python(hooks().on_message_wait_end, wait_.ptr())).is_valid()) {
            PyErr_WriteUnraisable(hooks().on_message_wait_end);
        }
        wait_.reset();
    }

protected:
    bool ask() override {
        // Rarely: a hundred threads may wait at once, and would all run Python code all the time.
        const std::int64_t now = core::now_ns();
        if (now < next_ns_) {
            return true;
        }
        next_ns_ = now + (++num_asked_ < 3 ? 110'000'000 : 500'000'000);
        wait_ = nb::steal(call_python_with(hooks().on_message_wait, "OOiiIO", wait_.is_valid() ? wait_.ptr() : Py_None,
                                           backend_.ptr(), dst_, src_, static_cast<unsigned int>(tag_), site_.ptr()));
        return wait_.is_valid();
    }

private:
    nb::handle backend_, site_;
    int dst_, src_;
    std::uint32_t tag_;
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
    void abandon(int code) { messages_.abandon(request, {static_cast<StatusCode>(code), request.peer}); }

    Request request;
    std::optional<View> view;
    ReceivedArray received;

private:
    nb::object group_;
    Messages& messages_;
    core::Spins* spins_;
};

template <class G>
void set_peer(Request& request, const G& self, int peer, std::uint32_t tag) {
    if (peer < 0 || peer >= self.group->size() || peer == self.group->rank()) {
        throw nb::value_error("no such peer");
    }
    request.peer = peer;
    request.tag = tag;
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
std::unique_ptr<HeldRequest> irecv(nb::handle group, int peer, std::uint32_t tag, const nb::bytes& header,
                                   nb::handle target) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = std::make_unique<HeldRequest>(group, self);
    set_peer(held->request, self, peer, tag);
    set_target(held->request, held->view, held->received, bytes_of(header), target);
    without_gil<GroupAccess<G>::keeps_gil>([&] { GroupAccess<G>::messages(self).irecv(held->request); });
    return held;
}

// -- calls in flight -------------------------------------------------------------------------------------

// What a call in flight holds on to, and what it gives.
struct SendMemory {
    InputArray x;
    nb::object object;
    nb::object result() { return nb::none(); }
};

struct ReceiveMemory {
    ReceiveTarget target;
    nb::object result() { return target.finish(); }
};

// Of a call on the general path, which has converted its arrays already.
struct ConvertedMemory {
    std::optional<View> view;  // none: of a message that says itself what it is
    ReceivedArray received;
    nb::object finish = nb::none();  // makes the result
    nb::object result() {
        if (!view) {
            return received.finish();
        }
        nb::object made = finish.is_none() ? nb::none() : nb::steal(call_python(finish.ptr()));
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
        MessageHook hook(backend_, dst(), src(), request.tag, site_);
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
    nb::object result() override { return memory.result(); }
    nb::object error() override {
        const Failure failure{request.status(), request.found, {}, {}};
        const bool was_patient = request.last_deadline_ns != 0 && core::now_ns() >= request.last_deadline_ns;
        const double timeout = seconds_of(timeout_ns_ + (was_patient ? longest_ns_ : 0));
        return make_error(backend_, failure, {dst(), src(), request.tag, timeout, request.header, site_});
    }
    void on_interrupt(nb::handle error) override {
        const char* const name = request.is_send ? "send" : "recv";
        if (!nb::steal(call_python_with(hooks().on_message_interrupt, "OsO", backend_.ptr(), name, error.ptr())).is_valid()) {
            throw nb::python_error();
        }
    }
    nb::object backend() override { return backend_; }
    PyObject* group() const override { return group_.ptr(); }

    Request request;
    Memory memory;

private:
    int dst() const { return request.is_send ? request.peer : -1; }
    int src() const { return request.is_send ? -1 : request.peer; }

    G& self_;
    nb::object group_, backend_, site_;
    std::int64_t timeout_ns_ = 0, longest_ns_ = 0;  // 0: none
};

// Posts a send and gives its Work.
template <class G, class Memory>
PyObject* start_send(std::unique_ptr<MessageInFlight<G, Memory>> made, core::Bytes header) {
    MessageInFlight<G, Memory>& call = *made;
    NewWork work({.dst = call.request.peer, .number = call.request.tag}, std::move(made));
    call.request.token = work.token();
    without_gil<GroupAccess<G>::keeps_gil>([&] { call.messages().isend(call.request, header); });
    return call.request.state() == Request::State::done ? work.release_done() : work.release();
}

template <class G, class Memory>
PyObject* start_receive(std::unique_ptr<MessageInFlight<G, Memory>> made) {
    MessageInFlight<G, Memory>& call = *made;
    NewWork work({.src = call.request.peer, .number = call.request.tag}, std::move(made));
    call.request.token = work.token();
    without_gil<GroupAccess<G>::keeps_gil>([&] { call.messages().irecv(call.request); });
    return work.release();
}

template <class Call>
void set_given_deadline(Call& call, nb::handle deadline) {
    const Deadline limit(deadline);
    call.set_deadline(limit.at_ns, limit.at_ns == 0 ? 0 : to_ns(limit.seconds), limit.patience);
}

template <class G>
nb::object start_converted_send(nb::handle group, nb::handle backend, int peer, std::uint32_t tag,
                                const nb::bytes& header, nb::handle payload, nb::handle deadline) {
    auto call = std::make_unique<MessageInFlight<G, ConvertedMemory>>(group, backend);
    call->memory.view.emplace(readable(payload));
    set_peer(call->request, *nb::inst_ptr<G>(group), peer, tag);
    set_source(call->request, *call->memory.view);
    set_given_deadline(*call, deadline);
    return nb::steal(start_send(std::move(call), bytes_of(header)));
}

template <class G>
nb::object start_converted_receive(nb::handle group, nb::handle backend, int peer, std::uint32_t tag,
                                   const nb::bytes& header, nb::handle target, nb::handle deadline,
                                   nb::object finish) {
    auto call = std::make_unique<MessageInFlight<G, ConvertedMemory>>(group, backend);
    set_peer(call->request, *nb::inst_ptr<G>(group), peer, tag);
    set_target(call->request, call->memory.view, call->memory.received, bytes_of(header), target);
    call->memory.finish = std::move(finish);
    set_given_deadline(*call, deadline);
    return nb::steal(start_receive(std::move(call)));
}

// -- the fast path: what it takes --------------------------------------------------------------------

// Reads another rank of the group, and the tag; false also where something is known to be wrong.
template <class G>
bool read_peer(Request& request, G& self, PyObject* peer, PyObject* tag) {
    int overflow = 0;
    const long number = PyLong_CheckExact(tag) ? PyLong_AsLongAndOverflow(tag, &overflow) : -1;
    if (overflow != 0 || number < 0 || number > largest_tag || !read_index(peer, self.group->size(), request.peer)) {
        return false;
    }
    request.tag = static_cast<std::uint32_t>(number);
    return request.peer != self.group->rank() && GroupAccess<G>::can_call(self, request.peer);
}

// What is to be sent; false: the general path.
template <class G>
bool read_send(Request& send, G& self, InputArray& x, PyObject* object, PyObject* dst, PyObject* tag) {
    if (!read_peer(send, self, dst, tag) || !x.read(object)) {
        return false;
    }
    send.source = x.data;
    send.nbytes = x.nbytes;
    return true;
}

// What is to be received, and where it goes; false: the general path.
template <class G>
bool read_receive(Request& receive, G& self, ReceiveTarget& target, PyObject* src, PyObject* out, PyObject* like,
                  PyObject* tag) {
    return read_peer(receive, self, src, tag) && target.read(receive, out, like);
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
    FastCall(G& self, const char* name, nb::handle backend, int dst, int src, std::uint32_t tag)
        : self_(self), messages_(GroupAccess<G>::messages(self)), name_(name),
          hook_(backend, dst, src, tag, Py_None),
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
        return failure_.status.code == StatusCode::unexpected || failure_.status.code == StatusCode::corrupt;
    }
    PyObject* raise(PyObject* backend, int dst, int src, std::uint32_t tag, core::Bytes expected = {}) {
        hook_.end();
        failure_.error = hook_.error();
        const bool was_patient = options_.patience.stuck_ns != 0 && !options_.is_patient();
        const double timeout = seconds_of(options_.timeout_ns + (was_patient ? options_.patience.longest_ns : 0));
        const MessageFacts facts{dst, src, tag, timeout, expected, nb::none(), name_};
        const nb::object error = make_error(backend, failure_, facts);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        return nullptr;
    }
    void end() { hook_.end(); }
    Messages& messages() { return messages_; }

private:
    G& self_;
    Messages& messages_;
    const char* name_;
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
    if (!read_send(send, self, x, args[1], args[2], args[3])) {
        return decline();
    }
    if (GroupAccess<G>::keeps_gil && send.nbytes <= core::eager_limit) {
        GroupAccess<G>::messages(self).isend(send, ArrayHeader(x).all());
        if (send.is_complete()) {
            Py_RETURN_NONE;
        }
    }
    FastCall<G> call(self, "send", args[0], send.peer, -1, send.tag);
    if (!GroupAccess<G>::keeps_gil || send.nbytes > core::eager_limit) {
        call.messages().isend(send, ArrayHeader(x).all());
    }
    if (!call.wait(send, true)) {
        return call.raise(args[0], send.peer, -1, send.tag);
    }
    call.end();
    Py_RETURN_NONE;
}

// args: backend, src, out, like, tag
template <class G>
PyObject* fast_recv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    ReceiveTarget target;
    OwnRequest receive(GroupAccess<G>::messages(self));
    if (!read_receive(receive, self, target, args[1], args[2], args[3], args[4])) {
        return decline();
    }
    FastCall<G> call(self, "recv", args[0], -1, receive.peer, receive.tag);
    call.messages().irecv(receive);
    if (!call.wait(receive, false)) {
        return call.raise(args[0], -1, receive.peer, receive.tag, receive.header);
    }
    call.end();
    return target.finish().release().ptr();
}

// args: backend, x, dst, src, out, like, tag
template <class G>
PyObject* fast_sendrecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    InputArray x;
    ReceiveTarget target;
    OwnRequest send(GroupAccess<G>::messages(self)), receive(GroupAccess<G>::messages(self));
    if (!read_send(send, self, x, args[1], args[2], args[6]) ||
        !read_receive(receive, self, target, args[3], args[4], args[5], args[6]) || target.overlaps(x)) {
        return decline();
    }
    FastCall<G> call(self, "sendrecv", args[0], send.peer, receive.peer, send.tag);
    call.messages().isend(send, ArrayHeader(x).all());
    call.messages().irecv(receive);
    // A message that came but does not fit is this rank's own affair: its own goes out. Else it is withdrawn.
    const bool is_received = call.wait(receive, false);
    if (is_received && call.wait(send, false)) {
        call.end();
        return target.finish().release().ptr();
    }
    if (!is_received && call.has_misfit()) {
        call.end();
        FastCall<G> rest(self, "sendrecv", args[0], send.peer, -1, send.tag);
        rest.wait(send, true);
        rest.end();
    }
    call.end(send);
    call.end(receive);
    return call.raise(args[0], send.peer, receive.peer, send.tag, receive.header);
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
    if (!read_send(call->request, self, call->memory.x, args[1], args[2], args[3])) {
        return decline();
    }
    call->memory.object = nb::borrow(args[1]);
    set_default_deadline(*call, self);
    const ArrayHeader header(call->memory.x);
    return start_send(std::move(call), header.all());
}

// args: backend, src, out, like, tag
template <class G>
PyObject* fast_irecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto call = std::make_unique<MessageInFlight<G, ReceiveMemory>>(self_object, args[0]);
    if (!read_receive(call->request, self, call->memory.target, args[1], args[2], args[3], args[4])) {
        return decline();
    }
    set_default_deadline(*call, self);
    return start_receive(std::move(call));
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
        .def("irecv", [](nb::handle self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle target) {
            return irecv<G>(self, peer, tag, header, target).release();
        }, nb::rv_policy::take_ownership, "peer"_a, "tag"_a, "header"_a, "target"_a.none(),
             "Post a receive to be waited for; without a target it takes whatever array comes.")
        .def("start_send", &start_converted_send<G>, "backend"_a, "peer"_a, "tag"_a, "header"_a, "payload"_a, "deadline"_a,
             "Post a send and return its Work; it fails by itself at the deadline.")
        .def("start_recv", &start_converted_receive<G>, "backend"_a, "peer"_a, "tag"_a, "header"_a, "target"_a.none(),
             "deadline"_a, "finish"_a.none(),
             "Post a receive, as start_send does; finish() makes the result if there is a target.")
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
        .def_prop_ro("fast_recv", [](nb::handle self) { return bind_fast<G, &fast_recv<G>, 5>(self); },
                     "The fast path of recv: (backend, src, out, like, tag).")
        .def_prop_ro("fast_sendrecv", [](nb::handle self) { return bind_fast<G, &fast_sendrecv<G>, 7>(self); },
                     "The fast path of sendrecv: (backend, x, dst, src, out, like, tag).")
        .def_prop_ro("fast_isend", [](nb::handle self) { return bind_fast<G, &fast_isend<G>, 4>(self); },
                     "The fast path of an async send: (backend, x, dst, tag) -> its Work.")
        .def_prop_ro("fast_irecv", [](nb::handle self) { return bind_fast<G, &fast_irecv<G>, 5>(self); },
                     "The fast path of an async recv: (backend, src, out, like, tag) -> its Work.");
}

template void add_messages<SharedGroup>(nb::class_<SharedGroup>& group);
template void add_messages<TcpGroup>(nb::class_<TcpGroup>& group);

void add_requests(nb::module_& module) {
    nb::class_<HeldRequest>(module, "Request", "A send or receive that is waited for.")
        .def("wait", &HeldRequest::wait, "deadline"_a, "holds_caller"_a, "poll"_a.none(),
             "Wait until it is complete; return a status.")
        .def("abandon", &HeldRequest::abandon, "code"_a, "End it, whatever has become of it.")
        .def("array", [](HeldRequest& self) { return self.received.finish(); },
             "Return the array that came where there was no target; once, when it is complete.")
        .def_prop_ro("found", [](const HeldRequest& self) {
            return nb::bytes(self.request.found.data(), self.request.found.size());
        }, "The header of a message that did not fit.");
}

}  // namespace ferrodist::bind
