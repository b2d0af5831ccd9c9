// SPDX-License-Identifier: MIT OR Apache-2.0
// The fast path of point-to-point calls on one array: one native function from the arguments to the result, or to the
// Work of a call in flight. What it does not take is declined, and takes the general path.
#include <limits>
#include <optional>

#include "bind/collective_call.hpp"
#include "bind/messages.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using core::Messages;
using core::Request;
using core::Status;
using core::StatusCode;

constexpr long largest_tag = std::numeric_limits<std::int32_t>::max();

// -- what it takes -----------------------------------------------------------------------------------

// Whether a call may be made; false also where something is known to be wrong. Who sends to itself, or receives
// from itself, must not wait for it.
bool can_call(const Request& request, const MessageGroup& self, bool waits) {
    return (!waits || request.peer != self.rank) && self.can_call_with(request.peer);
}

bool read_tag(std::uint32_t& tag, PyObject* object) {
    int overflow = 0;
    const long number = PyLong_CheckExact(object) ? PyLong_AsLongAndOverflow(object, &overflow) : -1;
    tag = static_cast<std::uint32_t>(number);
    return overflow == 0 && number >= 0 && number <= largest_tag;
}

// What is to be sent; false: the general path.
bool read_send(Request& send, const MessageGroup& self, InputArray& x, PyObject* object, PyObject* dst, PyObject* tag, bool waits) {
    if (!read_tag(send.tag, tag) || !read_index(dst, self.size, send.peer) || !can_call(send, self, waits) ||
        !x.read(object)) {
        return false;
    }
    send.source = x.data;
    send.nbytes = x.nbytes;
    return true;
}

// What is to be received, and where it goes; false: the general path.
bool read_receive(Request& receive, const MessageGroup& self, ReceiveTarget& target, PyObject* src, PyObject* out,
                  PyObject* like, PyObject* tag, PyObject* with_status, bool waits) {
    receive.takes_any_source = src == hooks().any_source;
    receive.takes_any_tag = tag == hooks().any_tag;
    const bool is_read = (receive.takes_any_tag || read_tag(receive.tag, tag)) &&
                         (receive.takes_any_source || read_index(src, self.size, receive.peer));
    const bool is_alone = receive.takes_any_source && self.size == 1;
    return is_read && !(waits && is_alone) && can_call(receive, self, waits) &&
           target.read(receive, out, like, PyObject_IsTrue(with_status) > 0);
}

// -- calls that wait ---------------------------------------------------------------------------------

// A request of a call that waits: whatever is thrown, nothing of it is left behind.
struct OwnRequest : Request {
    explicit OwnRequest(Messages& its_messages) : messages(its_messages) {}
    ~OwnRequest() { messages.abandon(*this, {StatusCode::given_up}); }

    Messages& messages;
};

// One call on the fast path, from its first wait to its result.
class FastMessage {
public:
    FastMessage(MessageGroup& self, const char* name, nb::handle backend, const TimeLimit& limit, const Peers& peers)
        : self_(self), messages_(self.messages()), name_(name), peers_(peers), hook_(backend, peers, Py_None),
          options_{&hook_, 0, self.spins, 0, limit.timeout_ns, limit.patience} {
        if (!self.keeps_gil) {
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
        if (status.failed_rank < 0 && request.is_send) {
            status.failed_rank = request.peer;
        }
        failure_.status = status;
        failure_.found = request.found;
        const bool may_be_cycle = holds_caller && request.is_send &&
                                  (status.code == StatusCode::late || status.code == StatusCode::lost);
        if (may_be_cycle) {
            failure_.cycle = self_.find_send_cycle(request.peer);
        }
        end(request);
        return false;
    }
    void end(Request& request) { messages_.abandon(request, failure_.status); }
    bool has_misfit() const {
        return failure_.status.code == StatusCode::unexpected || failure_.status.code == StatusCode::corrupt ||
               failure_.status.code == StatusCode::other_kind;
    }
    PyObject* raise(PyObject* backend, Bytes expected = {}) {
        hook_.end();
        nb::object error = hook_.error();
        if (!error.is_valid()) {
            error = caught([&] { throw_error(make_error(backend, failure_, facts(expected))); });
        }
        return bind::raise(abort_if_foreign(backend, name_, error).ptr());
    }
    void turn_to(const Request& request) {
        peers_ = Peers(request);
        hook_.turn_to(peers_);
    }
    // Throws what a signal handler has raised at the very end.
    void end() {
        hook_.end();
        if (hook_.error().is_valid()) {
            throw_error(hook_.error());
        }
    }
    Messages& messages() { return messages_; }

private:
    MessageFacts facts(Bytes expected) const {
        const bool was_patient = options_.patience.stuck_ns != 0 && !options_.is_patient();
        return {peers_, options_.timeout_ns + (was_patient ? options_.patience.longest_ns : 0), expected};
    }

    MessageGroup& self_;
    Messages& messages_;
    const char* name_;
    Peers peers_;
    MessageHook hook_;
    core::WaitOptions options_;
    Failure failure_;
};

// args: backend, x, dst, tag, timeout
PyObject* fast_send(PyObject* self_object, PyObject* const* args) {
    MessageGroup& self = *nb::inst_ptr<MessageGroup>(self_object);
    InputArray x;
    TimeLimit limit;
    OwnRequest send(self.messages());
    if (!limit.read(args[4], *self.calls) || !read_send(send, self, x, args[1], args[2], args[3], true)) {
        return decline();
    }
    if (self.keeps_gil && send.nbytes <= core::eager_limit) {
        self.messages().isend(send, ArrayHeader(x).all());
        if (send.is_complete()) {
            Py_RETURN_NONE;
        }
    }
    send.is_send = true;
    FastMessage call(self, "send", args[0], limit, Peers(send));
    if (!self.keeps_gil || send.nbytes > core::eager_limit) {
        call.messages().isend(send, ArrayHeader(x).all());
    }
    if (!call.wait(send, true)) {
        return call.raise(args[0]);
    }
    call.end();
    Py_RETURN_NONE;
}

// args: backend, src, out, like, tag, with_status, timeout
PyObject* fast_recv(PyObject* self_object, PyObject* const* args) {
    MessageGroup& self = *nb::inst_ptr<MessageGroup>(self_object);
    ReceiveTarget target;
    TimeLimit limit;
    OwnRequest receive(self.messages());
    if (!limit.read(args[6], *self.calls) ||
        !read_receive(receive, self, target, args[1], args[2], args[3], args[4], args[5], true)) {
        return decline();
    }
    FastMessage call(self, "recv", args[0], limit, Peers(receive));
    call.messages().irecv(receive);
    if (!call.wait(receive, false)) {
        return call.raise(args[0], receive.header);
    }
    call.end();
    return target.finish(receive).release().ptr();
}

// args: backend, x, dst, src, out, like, tag, recv_tag, timeout
PyObject* fast_sendrecv(PyObject* self_object, PyObject* const* args) {
    MessageGroup& self = *nb::inst_ptr<MessageGroup>(self_object);
    InputArray x;
    ReceiveTarget target;
    TimeLimit limit;
    OwnRequest send(self.messages()), receive(self.messages());
    PyObject* const recv_tag = args[7] == Py_None ? args[6] : args[7];
    if (!limit.read(args[8], *self.calls) || !read_send(send, self, x, args[1], args[2], args[6], true) ||
        !read_receive(receive, self, target, args[3], args[4], args[5], recv_tag, Py_False, true) || target.overlaps(x)) {
        return decline();
    }
    send.is_send = true;
    FastMessage call(self, "sendrecv", args[0], limit, Peers(send, receive));
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
        FastMessage rest(self, "sendrecv", args[0], limit, Peers(send));
        rest.wait(send, true);
        rest.end();
    }
    call.end(send);
    call.end(receive);
    return call.raise(args[0], receive.header);
}

// -- exchanges between the neighbors of a grid -------------------------------------------------------

// What goes to a neighbor and what comes from it.
struct NeighborMessages {
    explicit NeighborMessages(Messages& messages) : send(messages), receive(messages) {}

    InputArray x;
    ReceiveTarget target;
    OwnRequest send, receive;
};

// One exchange: everything is posted, then all of it is waited for. Messages of one way have one tag, and come from
// the other side.
class Exchange {
public:
    Exchange(MessageGroup& self, Py_ssize_t num_ways) : self_(self), ways_(static_cast<std::size_t>(num_ways)) {}

    // False: the general path. `peers` has a rank for each way, or none below 0; `out` is a list or None.
    bool read(PyObject* peers, long first_tag, PyObject* parts, PyObject* out) {
        for (std::size_t way = 0; way < ways_.size(); ++way) {
            const auto place = static_cast<Py_ssize_t>(way);
            const int peer = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(peers, place)));
            if (peer < 0) {
                continue;
            }
            NeighborMessages& one = ways_[way].emplace(self_.messages());
            one.send.peer = one.receive.peer = peer;
            one.send.tag = static_cast<std::uint32_t>(first_tag + place);
            one.receive.tag = static_cast<std::uint32_t>(first_tag + (place ^ 1));
            PyObject* const room = out == Py_None ? Py_None : PyList_GET_ITEM(out, place);
            if (!self_.can_call_with(peer) || !one.x.read(PyList_GET_ITEM(parts, place)) ||
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
        FastMessage call(self_, "an exchange with neighbors", backend, {self_.calls->timeout_ns, self_.calls->patience}, {});
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
    bool wait(FastMessage& call, Request& request) {
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

    MessageGroup& self_;
    std::vector<std::optional<NeighborMessages>> ways_;
};

// args: backend, peers, first tag, parts, out
PyObject* fast_exchange(PyObject* self_object, PyObject* const* args) {
    Exchange exchange(*nb::inst_ptr<MessageGroup>(self_object), PyTuple_GET_SIZE(args[1]));
    const bool is_read = exchange.read(args[1], PyLong_AsLong(args[2]), args[3], args[4]);
    return is_read ? exchange.run(args[0]) : decline();
}

// -- calls in flight ---------------------------------------------------------------------------------

struct SendInFlight final : MessageInFlight {
    using MessageInFlight::MessageInFlight;
    ~SendInFlight() override { abandon(); }
    nb::object result() override { return nb::none(); }
    int traverse(visitproc visit, void* arg) const override {
        Py_VISIT(kept.ptr());
        return 0;
    }

    bool read(PyObject* object, PyObject* dst, PyObject* tag) {
        kept = nb::borrow(object);
        return read_send(request, self, x, object, dst, tag, false);
    }

    InputArray x;
    nb::object kept;
};

struct ReceiveInFlight final : MessageInFlight {
    using MessageInFlight::MessageInFlight;
    ~ReceiveInFlight() override { abandon(); }
    nb::object result() override { return target.finish(request); }

    ReceiveTarget target;
};

// None: the general path.
template <class Call>
std::unique_ptr<Call> new_call(PyObject* group, PyObject* backend, PyObject* timeout) {
    auto call = std::make_unique<Call>(group, backend);
    TimeLimit limit;
    if (!limit.read(timeout, *call->self.calls)) {
        return nullptr;
    }
    call->set_deadline(limit.timeout_ns == 0 ? 0 : core::now_ns() + limit.timeout_ns, limit.timeout_ns, limit.patience);
    return call;
}

// args: backend, x, dst, tag, timeout
PyObject* fast_isend(PyObject* group, PyObject* const* args) {
    auto call = new_call<SendInFlight>(group, args[0], args[4]);
    if (call == nullptr || !call->read(args[1], args[2], args[3])) {
        return decline();
    }
    const ArrayHeader header(call->x);
    return start_send(std::move(call), header.all());
}

// args: backend, src, out, like, tag, with_status, timeout
PyObject* fast_irecv(PyObject* group, PyObject* const* args) {
    auto call = new_call<ReceiveInFlight>(group, args[0], args[6]);
    if (call == nullptr ||
        !read_receive(call->request, call->self, call->target, args[1], args[2], args[3], args[4], args[5], false)) {
        return decline();
    }
    return start_receive(std::move(call));
}

// args: backend, x, dst, src, out, like, tag, recv_tag, timeout
PyObject* fast_isendrecv(PyObject* group, PyObject* const* args) {
    auto send = new_call<SendInFlight>(group, args[0], args[8]);
    auto receive = new_call<ReceiveInFlight>(group, args[0], args[8]);
    PyObject* const recv_tag = args[7] == Py_None ? args[6] : args[7];
    if (send == nullptr || receive == nullptr || !send->read(args[1], args[2], args[6]) ||
        !read_receive(receive->request, receive->self, receive->target, args[3], args[4], args[5], recv_tag, Py_False, false) ||
        receive->target.overlaps(send->x)) {
        return decline();
    }
    const ArrayHeader header(send->x);
    return start_sendrecv(std::move(send), header.all(), std::move(receive));
}

template <FastFunction call, Py_ssize_t num_args>
nb::object bind_fast(nb::handle group) {
    static PyMethodDef definition = {"fast", as_function<call, num_args>(), METH_FASTCALL,
                                     "A point-to-point call on one array; NotImplemented sends it the general path."};
    return checked(PyCFunction_New(&definition, group.ptr()));
}

}  // namespace

void add_fast_messages(nb::class_<MessageGroup, NativeGroup>& group) {
    group
        .def_prop_ro("fast_send", &bind_fast<&fast_send, 5>, "The fast path of send: (backend, x, dst, tag, timeout).")
        .def_prop_ro("fast_exchange", &bind_fast<&fast_exchange, 5>,
                     "An exchange with neighbors: (backend, peers, first tag, parts, list of out or None).")
        .def_prop_ro("fast_recv", &bind_fast<&fast_recv, 7>,
                     "The fast path of recv: (backend, src, out, like, tag, with_status, timeout).")
        .def_prop_ro("fast_sendrecv", &bind_fast<&fast_sendrecv, 9>,
                     "The fast path of sendrecv: (backend, x, dst, src, out, like, tag, recv_tag, timeout).")
        .def_prop_ro("fast_isend", &bind_fast<&fast_isend, 5>,
                     "The fast path of an async send: as of send -> its Work.")
        .def_prop_ro("fast_irecv", &bind_fast<&fast_irecv, 7>, "The fast path of an async recv: as of recv -> its Work.")
        .def_prop_ro("fast_isendrecv", &bind_fast<&fast_isendrecv, 9>,
                     "The fast path of an async sendrecv, as of sendrecv -> its Work.");
}

}  // namespace ferrodist::bind
