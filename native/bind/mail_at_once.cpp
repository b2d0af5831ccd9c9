// SPDX-License-Identifier: MIT OR Apache-2.0
// The short way of send and recv: plain NumPy arrays, one native function.
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "bind/arrays.hpp"
#include "bind/call_path.hpp"
#include "bind/gil_watch.hpp"
#include "bind/shared_group.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

constexpr std::uint64_t any_sequence = std::numeric_limits<std::uint64_t>::max();
constexpr long largest_tag = std::numeric_limits<std::int32_t>::max();

// Dtype, number of axes and lengths: as pack_array_header of ferrodist.transports.framing.
class ArrayHeader {
public:
    explicit ArrayHeader(const PlainArray& array) : nbytes_(2 + 8 * static_cast<std::size_t>(array.num_axes)) {
        bytes_[0] = static_cast<std::byte>(array.dtype);
        bytes_[1] = static_cast<std::byte>(array.num_axes);
        std::memcpy(bytes_.data() + 2, array.shape, nbytes_ - 2);
    }
    shm::ByteView view() const { return {bytes_.data(), nbytes_}; }

private:
    std::array<std::byte, 2 + 8 * max_axes> bytes_;
    std::size_t nbytes_;
};

// Another rank of the group, at a point where nothing is known to be wrong.
std::optional<int> find_peer(const SharedGroup& self, PyObject* number) {
    int peer = -1;
    const shm::Group& group = *self.group;
    const bool is_fine = can_call(self) && read_index(number, group.size(), peer) && peer != group.rank() &&
                         !group.has_verdict(any_sequence) && !group.has_left(peer);
    return is_fine ? std::optional(peer) : std::nullopt;
}

std::optional<std::uint32_t> read_tag(PyObject* object) {
    int overflow = 0;
    const long tag = PyLong_CheckExact(object) ? PyLong_AsLongAndOverflow(object, &overflow) : -1;
    return overflow == 0 && tag >= 0 && tag <= largest_tag ? std::optional(static_cast<std::uint32_t>(tag))
                                                           : std::nullopt;
}

// args: backend, x, dst, tag
PyObject* send_at_once(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    SharedGroup& self = *nb::inst_ptr<SharedGroup>(self_object);
    const auto peer = find_peer(self, args[2]);
    const auto tag = read_tag(args[3]);
    const auto x = peer && tag ? try_plain_array(args[1]) : std::nullopt;
    if (!x || x->nbytes > shm::Messages::largest_whole) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    self.messages.post(*peer, *tag, ArrayHeader(*x).view(), x->data, x->nbytes);
    Py_RETURN_NONE;
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

// Counts a receive in flight; ends with the GIL held.
class InLine {
public:
    InLine(SharedGroup& group, GilWatch& watch) : group_(group), watch_(watch) { ++group_.num_in_line; }
    ~InLine() {
        watch_.take_back();
        --group_.num_in_line;
    }
    InLine(const InLine&) = delete;
    InLine& operator=(const InLine&) = delete;

private:
    SharedGroup& group_;
    GilWatch& watch_;
};

// What ended badly is told, and raised, by Python.
PyObject* raise_failure(PyObject* const* args, const shm::Ending& ending, const GilWatch& watch,
                        const std::vector<std::byte>& found) {
    const nb::object error = watch.error().is_valid() ? watch.error() : nb::none();
    const nb::bytes header(reinterpret_cast<const char*>(found.data()), found.size());
    return PyObject_CallMethod(args[0], "_fail_recv_at_once", "iiOOOOO", static_cast<int>(ending.outcome),
                               ending.culprit, error.ptr(), header.ptr(), args[1], args[2], args[4]);
}

// args: backend, like, src, out, tag
PyObject* recv_at_once(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    SharedGroup& self = *nb::inst_ptr<SharedGroup>(self_object);
    const auto peer = self.num_in_line == 0 ? find_peer(self, args[2]) : std::nullopt;
    const auto tag = read_tag(args[4]);
    const auto like = peer && tag ? try_plain_array(args[1]) : std::nullopt;
    nb::object result = like ? place_for(args[1], args[3], *like) : nb::object();
    if (!result.is_valid()) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    std::byte* const target = try_plain_array(result.ptr())->data;
    std::vector<std::byte> found;
    GilWatch watch(args[0], "_look_at_mail");
    const shm::Patience patience{&watch, 0, self.group->spins(), 0, self.timeout_ns};
    shm::Ending ending;
    {
        const InLine place(self, watch);
        ending = self.messages.receive(*peer, *tag, ArrayHeader(*like).view(), target, like->nbytes, patience, found);
    }
    return ending.failed() ? raise_failure(args, ending, watch, found) : result.release().ptr();
}

PyMethodDef send_definition = {"send_at_once", as_function<&send_at_once, 4>(), METH_FASTCALL,
                               "Send a small plain array; NotImplemented sends the call the general way."};
PyMethodDef recv_definition = {"recv_at_once", as_function<&recv_at_once, 5>(), METH_FASTCALL,
                               "Receive a plain array; NotImplemented sends the call the general way."};

}  // namespace

nb::object bind_send_at_once(nb::handle shared_group) {
    return nb::steal(PyCFunction_New(&send_definition, shared_group.ptr()));
}

nb::object bind_recv_at_once(nb::handle shared_group) {
    return nb::steal(PyCFunction_New(&recv_definition, shared_group.ptr()));
}

}  // namespace ferrodist::bind
