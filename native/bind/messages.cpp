// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/messages.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <optional>
#include <tuple>

#include "bind/answer.hpp"
#include "bind/arrays.hpp"
#include "bind/call_path.hpp"
#include "bind/buffers.hpp"
#include "bind/gil_watch.hpp"
#include "core/completions.hpp"

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

nb::bytes to_bytes(const std::vector<std::byte>& bytes) {
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Lets go of the GIL for a while, where a lock may be held for long.
template <bool keeps_gil, class Call>
auto without_gil(const Call& call) {
    if constexpr (keeps_gil) {
        return call();
    } else {
        const nb::gil_scoped_release unlocked;
        return call();
    }
}

// -- requests ----------------------------------------------------------------------------------------

// A request as Python sees it: holds on to its group and to the memory it names.
class HeldRequest {
public:
    template <class G>
    HeldRequest(nb::handle group, G& self) : group_(nb::borrow(group)), messages_(GroupAccess<G>::messages(self)),
                                             spins_(GroupAccess<G>::spins(self)) {}
    ~HeldRequest() { messages_.abandon(request, {StatusCode::given_up}); }
    HeldRequest(const HeldRequest&) = delete;
    HeldRequest& operator=(const HeldRequest&) = delete;

    bool test() {
        const nb::gil_scoped_release unlocked;
        return messages_.test(request);
    }

    // Outcome, rank and error of the request if it is complete, else of the wait that ended before.
    Answer wait(double deadline, bool holds_caller, nb::handle look) {
        GilWatch watch(look.ptr());
        const core::WaitOptions options{&watch, deadline_ns(deadline), spins_};
        watch.let_go();
        const Status status = messages_.wait(request, options, holds_caller);
        watch.take_back();
        return answer(status.failed() ? status : request.status(), watch);
    }

    bool cancel(int outcome) { return messages_.cancel(request, {static_cast<StatusCode>(outcome), request.peer}); }
    void abandon(int outcome) { messages_.abandon(request, {static_cast<StatusCode>(outcome), request.peer}); }
    void hear(std::uint64_t token) {
        const nb::gil_scoped_release unlocked;
        messages_.hear_of(request, token);
    }

    Request request;
    std::optional<View> view;
    nb::object array;

private:
    nb::object group_;
    Messages& messages_;
    shm::Spins* spins_;
};

nb::object give(std::unique_ptr<HeldRequest> held) {
    return nb::cast(held.release(), nb::rv_policy::take_ownership);
}

// What is the same for a send and a receive. A token makes it one that somebody else makes progress for.
template <class G>
std::unique_ptr<HeldRequest> new_request(nb::handle group, G& self, int peer, std::uint32_t tag, double deadline,
                                         std::uint64_t token) {
    if (peer < 0 || peer >= self.group->size() || peer == self.group->rank()) {
        throw nb::value_error("no such peer");
    }
    auto held = std::make_unique<HeldRequest>(group, self);
    held->request.peer = peer;
    held->request.tag = tag;
    held->request.token = token;
    held->request.is_unattended = token != 0;
    held->request.deadline_ns = token == 0 ? 0 : deadline_ns(deadline);
    return held;
}

template <class G>
nb::object isend(nb::handle group, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload,
                 double deadline, std::uint64_t token) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = new_request(group, self, peer, tag, deadline, token);
    held->view.emplace(readable(payload));
    held->request.source = static_cast<const std::byte*>(held->view->data());
    held->request.nbytes = held->view->nbytes();
    without_gil<GroupAccess<G>::keeps_gil>(
        [&] { GroupAccess<G>::messages(self).isend(held->request, bytes_of(header)); });
    return give(std::move(held));
}

template <class G>
nb::object irecv(nb::handle group, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle target,
                 double deadline, std::uint64_t token) {
    G& self = *nb::inst_ptr<G>(group);
    auto held = new_request(group, self, peer, tag, deadline, token);
    held->view.emplace(writable(target));
    const core::Bytes expected = bytes_of(header);
    held->request.header.assign(expected.begin(), expected.end());
    held->request.target = static_cast<std::byte*>(held->view->data());
    held->request.nbytes = held->view->nbytes();
    without_gil<GroupAccess<G>::keeps_gil>([&] { GroupAccess<G>::messages(self).irecv(held->request); });
    return give(std::move(held));
}

// -- the fast path: what it takes --------------------------------------------------------------------

// Dtype, number of axes and lengths: as pack_array_header of ferrodist.transports.framing.
class ArrayHeader {
public:
    explicit ArrayHeader(const PlainArray& array) : nbytes_(2 + 8 * static_cast<std::size_t>(array.num_axes)) {
        bytes_[0] = static_cast<std::byte>(array.dtype);
        bytes_[1] = static_cast<std::byte>(array.num_axes);
        std::memcpy(bytes_.data() + 2, array.shape, nbytes_ - 2);
    }
    core::Bytes view() const { return {bytes_.data(), nbytes_}; }

private:
    std::array<std::byte, 2 + 8 * max_axes> bytes_;
    std::size_t nbytes_;
};

// Another rank of the group, at a point where nothing is known to be wrong.
template <class G>
std::optional<int> read_peer(G& self, PyObject* number) {
    int peer = -1;
    const bool is_fine = read_index(number, self.group->size(), peer) && peer != self.group->rank() &&
                         GroupAccess<G>::can_call(self, peer);
    return is_fine ? std::optional(peer) : std::nullopt;
}

std::optional<std::uint32_t> read_tag(PyObject* object) {
    int overflow = 0;
    const long tag = PyLong_CheckExact(object) ? PyLong_AsLongAndOverflow(object, &overflow) : -1;
    return overflow == 0 && tag >= 0 && tag <= largest_tag ? std::optional(static_cast<std::uint32_t>(tag))
                                                           : std::nullopt;
}

// What is to be sent, if the fast path takes it.
template <class G>
bool read_send(Request& send, G& self, PyObject* x, PyObject* dst, PyObject* tag, std::optional<PlainArray>& array) {
    const auto peer = read_peer(self, dst);
    const auto number = read_tag(tag);
    array = peer && number ? try_plain_array(x) : std::nullopt;
    if (!array) {
        return false;
    }
    send.peer = *peer;
    send.tag = *number;
    send.source = array->data;
    send.nbytes = array->nbytes;
    return true;
}

// Where the message goes: the caller's array, or a new one. Null sends the call the general way.
nb::object place_for(PyObject* like, PyObject* out, const PlainArray& wanted) {
    if (out == Py_None) {
        return nb::steal(new_array_like(like, wanted.num_axes, wanted.shape));
    }
    const auto found = try_plain_array(out);
    const bool is_fine = found && found->is_writable && found->dtype == wanted.dtype &&
                         found->num_axes == wanted.num_axes &&
                         std::equal(found->shape, found->shape + wanted.num_axes, wanted.shape);
    return is_fine ? nb::borrow(out) : nb::object();
}

// What is to be received and the array it goes to; null if the fast path does not take it.
template <class G>
nb::object read_receive(Request& receive, G& self, PyObject* like, PyObject* src, PyObject* out, PyObject* tag) {
    const auto peer = read_peer(self, src);
    const auto number = read_tag(tag);
    const auto wanted = peer && number ? try_plain_array(like) : std::nullopt;
    nb::object result = wanted ? place_for(like, out, *wanted) : nb::object();
    if (!result.is_valid()) {
        return result;
    }
    const ArrayHeader header(*wanted);
    receive.header.assign(header.view().begin(), header.view().end());
    receive.peer = *peer;
    receive.tag = *number;
    receive.target = try_plain_array(result.ptr())->data;
    receive.nbytes = wanted->nbytes;
    return result;
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
    FastCall(G& self, PyObject* backend, const char* name)
        : self_(self), messages_(GroupAccess<G>::messages(self)), backend_(backend), name_(name),
          watch_(backend, "_look_in_message"),
          options_{&watch_, 0, GroupAccess<G>::spins(self), 0, self.timeout_ns} {
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
        status_ = status;
        found_ = request.found;
        const bool may_be_cycle = holds_caller && request.is_send &&
                                  (status.outcome == StatusCode::late || status.outcome == StatusCode::lost);
        if (may_be_cycle) {
            cycle_ = GroupAccess<G>::find_send_cycle(self_, request.peer);
        }
        end(request);
        return false;
    }
    void end(Request& request) { messages_.abandon(request, status_); }
    bool has_misfit() const { return status_.outcome == StatusCode::unexpected || status_.outcome == StatusCode::corrupt; }
    // Ends with the GIL.
    PyObject* give(nb::object result) {
        watch_.take_back();
        return result.release().ptr();
    }
    PyObject* raise(PyObject* expected, int dst, int src, std::uint32_t tag) {
        watch_.take_back();
        const nb::object error = watch_.error().is_valid() ? watch_.error() : nb::none();
        nb::object cycle = nb::cast(cycle_);
        return PyObject_CallMethod(backend_, "_fail_message", "siiOOOOiii", name_, static_cast<int>(status_.outcome),
                                   status_.culprit, error.ptr(), to_bytes(found_).ptr(), cycle.ptr(), expected, dst,
                                   src, static_cast<int>(tag));
    }
    void take_gil_back() { watch_.take_back(); }
    Messages& messages() { return messages_; }

private:
    G& self_;
    Messages& messages_;
    PyObject* backend_;
    const char* name_;
    GilWatch watch_;
    core::WaitOptions options_;
    Status status_;
    std::vector<std::byte> found_;
    std::vector<int> cycle_;
};

// args: backend, x, dst, tag
template <class G>
PyObject* fast_send(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    OwnRequest send(GroupAccess<G>::messages(self));
    std::optional<PlainArray> x;
    if (!read_send(send, self, args[1], args[2], args[3], x)) {
        return decline();
    }
    if (GroupAccess<G>::keeps_gil && send.nbytes <= core::eager_limit) {
        GroupAccess<G>::messages(self).isend(send, ArrayHeader(*x).view());
        if (send.is_complete()) {
            Py_RETURN_NONE;
        }
    }
    FastCall<G> call(self, args[0], "send");
    if (!GroupAccess<G>::keeps_gil || send.nbytes > core::eager_limit) {
        call.messages().isend(send, ArrayHeader(*x).view());
    }
    return call.wait(send, true) ? call.give(nb::none()) : call.raise(Py_None, send.peer, -1, send.tag);
}

// args: backend, like, src, out, tag
template <class G>
PyObject* fast_recv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    OwnRequest receive(GroupAccess<G>::messages(self));
    nb::object result = read_receive(receive, self, args[1], args[2], args[3], args[4]);
    if (!result.is_valid()) {
        return decline();
    }
    FastCall<G> call(self, args[0], "recv");
    call.messages().irecv(receive);
    return call.wait(receive, false) ? call.give(std::move(result))
                                     : call.raise(args[1], -1, receive.peer, receive.tag);
}

// args: backend, x, dst, like, src, out, tag
template <class G>
PyObject* fast_sendrecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    OwnRequest send(GroupAccess<G>::messages(self)), receive(GroupAccess<G>::messages(self));
    std::optional<PlainArray> x;
    nb::object result;
    if (!read_send(send, self, args[1], args[2], args[6], x) ||
        !(result = read_receive(receive, self, args[3], args[4], args[5], args[6])).is_valid()) {
        return decline();
    }
    FastCall<G> call(self, args[0], "sendrecv");
    call.messages().isend(send, ArrayHeader(*x).view());
    call.messages().irecv(receive);
    // A message that came but does not fit is this rank's own affair: its own goes out. Else it is withdrawn.
    const bool is_received = call.wait(receive, false);
    if (is_received && call.wait(send, false)) {
        return call.give(std::move(result));
    }
    if (!is_received && call.has_misfit()) {
        call.take_gil_back();
        FastCall<G> rest(self, args[0], "sendrecv");
        rest.wait(send, true);
    }
    call.end(send);
    call.end(receive);
    return call.raise(args[3], send.peer, receive.peer, send.tag);
}

// -- the fast path: calls in flight ------------------------------------------------------------------

std::uint64_t read_token(PyObject* object) {
    const std::uint64_t token = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return token;
}

template <class G>
void set_unattended(Request& request, const G& self, PyObject* token) {
    request.token = read_token(token);
    request.is_unattended = true;
    request.deadline_ns = self.timeout_ns == 0 ? 0 : shm::now_ns() + self.timeout_ns;
}

// args: backend, x, dst, tag, token. Gives None if it is done.
template <class G>
PyObject* fast_isend(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto held = std::make_unique<HeldRequest>(self_object, self);
    std::optional<PlainArray> x;
    if (!read_send(held->request, self, args[1], args[2], args[3], x)) {
        return decline();
    }
    set_unattended(held->request, self, args[4]);
    held->array = nb::borrow(args[1]);
    const ArrayHeader header(*x);
    without_gil<GroupAccess<G>::keeps_gil>(
        [&] { GroupAccess<G>::messages(self).isend(held->request, header.view()); });
    if (held->request.state() == Request::State::done) {
        Py_RETURN_NONE;
    }
    return give(std::move(held)).release().ptr();
}

// args: backend, like, src, out, tag, token. Gives the request and the array.
template <class G>
PyObject* fast_irecv(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    G& self = *nb::inst_ptr<G>(self_object);
    auto held = std::make_unique<HeldRequest>(self_object, self);
    nb::object result = read_receive(held->request, self, args[1], args[2], args[3], args[4]);
    if (!result.is_valid()) {
        return decline();
    }
    set_unattended(held->request, self, args[5]);
    held->array = result;
    without_gil<GroupAccess<G>::keeps_gil>([&] { GroupAccess<G>::messages(self).irecv(held->request); });
    return PyTuple_Pack(2, give(std::move(held)).ptr(), result.ptr());
}

template <class G, FastFunction call, Py_ssize_t num_args>
nb::object bind_fast(nb::handle group) {
    static PyMethodDef definition = {"fast", as_function<call, num_args>(), METH_FASTCALL,
                                     "A point-to-point call on plain arrays; NotImplemented sends it the general way."};
    return nb::steal(PyCFunction_New(&definition, group.ptr()));
}

}  // namespace

template <class G>
void add_messages(nb::class_<G>& group) {
    using Access = GroupAccess<G>;
    group
        .def("isend", [](nb::handle self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload,
                         double deadline, std::uint64_t token) {
            return isend<G>(self, peer, tag, header, payload, deadline, token);
        }, "peer"_a, "tag"_a, "header"_a, "payload"_a, "deadline"_a, "token"_a,
             "Post a send; with a token it fails by itself, and next_completions() is told.")
        .def("irecv", [](nb::handle self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle target,
                         double deadline, std::uint64_t token) {
            return irecv<G>(self, peer, tag, header, target, deadline, token);
        }, "peer"_a, "tag"_a, "header"_a, "target"_a, "deadline"_a, "token"_a, "Post a receive, as isend does.")
        .def("unexpected_tags", [](G& self, int peer) {
            const nb::gil_scoped_release unlocked;
            return Access::messages(self).unexpected_tags(peer);
        }, "peer"_a, "List the tags of messages that have come and nobody received.")
        .def("find_send_cycle", [](G& self, int peer) {
            const nb::gil_scoped_release unlocked;
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
                     "The fast path of recv: (backend, like, src, out, tag).")
        .def_prop_ro("fast_sendrecv", [](nb::handle self) { return bind_fast<G, &fast_sendrecv<G>, 7>(self); },
                     "The fast path of sendrecv: (backend, x, dst, like, src, out, tag).")
        .def_prop_ro("fast_isend", [](nb::handle self) { return bind_fast<G, &fast_isend<G>, 5>(self); },
                     "The fast path of an async send: (backend, x, dst, tag, token).")
        .def_prop_ro("fast_irecv", [](nb::handle self) { return bind_fast<G, &fast_irecv<G>, 6>(self); },
                     "The fast path of an async recv: (backend, like, src, out, tag, token).");
}

template void add_messages<SharedGroup>(nb::class_<SharedGroup>& group);
template void add_messages<TcpGroup>(nb::class_<TcpGroup>& group);

void add_requests(nb::module_& module) {
    module.def("wake_completions", [] { core::Completions::of_process().add(0); },
               "Let next_completions() return, with a token of nobody.");
    nb::class_<HeldRequest>(module, "Request", "A send or receive, from when it is posted until it is complete.")
        .def("test", &HeldRequest::test, "Make progress without waiting, and tell whether it is complete.")
        .def("wait", &HeldRequest::wait, "deadline"_a, "holds_caller"_a, "look"_a,
             "Wait until it is complete; return outcome, failed rank, the error that ended the wait.")
        .def("cancel", &HeldRequest::cancel, "outcome"_a, "Withdraw it; False if it is matched, or complete.")
        .def("abandon", &HeldRequest::abandon, "outcome"_a, "End it, whatever has become of it.")
        .def("hear", &HeldRequest::hear, "token"_a, "Have next_completions() told of it, however it ends.")
        .def_prop_ro("is_complete", [](const HeldRequest& self) { return self.request.is_complete(); },
                     "Whether it is done or has failed.")
        .def_prop_ro("status", [](const HeldRequest& self) {
            const Status& status = self.request.status();
            return std::pair(static_cast<int>(status.outcome), status.culprit);
        }, "Outcome and failed rank of a request that is complete.")
        .def_prop_ro("found", [](const HeldRequest& self) { return to_bytes(self.request.found); },
                     "The header of a message that did not fit.");
    module.def("next_completions", [](double timeout) {
        GilWatch watch(Py_None);
        watch.let_go();
        const std::vector<std::uint64_t> tokens = core::Completions::of_process().take(to_ns(timeout));
        watch.take_back();
        return tokens;
    }, "timeout"_a, "Wait for completed requests that somebody wants to hear of; return their tokens.");
}

}  // namespace ferrodist::bind
