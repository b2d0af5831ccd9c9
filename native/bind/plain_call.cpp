// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/plain_call.hpp"

#include <algorithm>
#include <cstring>

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

thread_local bool is_marked = false;

bool is_reduction(shm::Kind kind) {
    return kind == shm::Kind::allreduce || kind == shm::Kind::reduce || kind == shm::Kind::reduce_scatter;
}

// ferrodist.ReduceOp; kept for good.
PyTypeObject* reduce_op_type() {
    static PyObject* const type =
        nb::module_::import_("ferrodist.reduce_op").attr("ReduceOp").inc_ref().ptr();
    return reinterpret_cast<PyTypeObject*>(type);
}

bool is_rooted(shm::Kind kind) {
    return kind == shm::Kind::broadcast || kind == shm::Kind::reduce || kind == shm::Kind::gather;
}

// The shape of the result; false where the array cannot be cut among the ranks.
bool find_shape(PlainCall& call, int world) {
    const PlainArray& x = *call.x;
    call.num_axes = x.num_axes;
    std::memcpy(call.shape, x.shape, static_cast<std::size_t>(x.num_axes) * sizeof(*x.shape));
    const bool is_cut = call.kind == shm::Kind::reduce_scatter || call.kind == shm::Kind::all_to_all;
    if (is_cut && world > 1) {
        if (x.num_axes == 0 || x.shape[0] % world != 0) {
            return false;
        }
        call.shape[0] = call.kind == shm::Kind::all_to_all ? x.shape[0] : x.shape[0] / world;
    }
    if (call.kind == shm::Kind::all_gather || call.kind == shm::Kind::gather) {
        call.num_axes = std::max(x.num_axes, 1);
        call.shape[0] = (x.num_axes == 0 ? 1 : x.shape[0]) * world;
    }
    return true;
}

bool fits(const PlainArray& out, const PlainCall& call) {
    return out.is_writable && out.dtype == call.x->dtype && out.num_axes == call.num_axes &&
           std::memcmp(out.shape, call.shape, static_cast<std::size_t>(call.num_axes) * sizeof(*call.shape)) == 0;
}

enum class Sharing { none, same, other };

Sharing sharing(const std::byte* x, std::size_t x_nbytes, const std::byte* out, std::size_t out_nbytes) {
    if (x_nbytes == 0 || out_nbytes == 0 || x + x_nbytes <= out || out + out_nbytes <= x) {
        return Sharing::none;
    }
    return x == out && x_nbytes == out_nbytes ? Sharing::same : Sharing::other;
}

}  // namespace

Fingerprint begin_fingerprint(shm::Kind kind, int op, int root, bool reproducible) {
    Fingerprint hash;
    hash.add(static_cast<std::int64_t>(kind));
    hash.add(std::int64_t{op});
    hash.add(std::int64_t{root});
    hash.add(std::int64_t{0});  // no algorithm named
    hash.add(std::int64_t{reproducible});
    hash.add(std::int64_t{0});  // no pickle
    return hash;
}

std::uint64_t fingerprint(const PlainCall& call, bool reproducible) {
    static const std::uint64_t no_path = hash_text("");
    Fingerprint hash = begin_fingerprint(call.kind, call.op, call.root, reproducible);
    if (call.x) {
        hash.add(no_path);
        hash.add(static_cast<std::int64_t>(call.x->dtype));
        hash.add(std::int64_t{call.x->num_axes});
        for (int axis = 0; axis < call.x->num_axes; ++axis) {
            hash.add(std::int64_t{call.x->shape[axis]});
        }
    }
    return hash.value();
}

bool read_index(PyObject* object, int limit, int& into) {
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        return false;
    }
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(object, &overflow);
    into = static_cast<int>(value);
    return overflow == 0 && value >= 0 && value < limit;
}

bool read_plain_call(PlainCall& call, PyObject* const* args, int world, int rank) {
    // A member of ReduceOp is an int, but not every int is a member of it.
    if (is_reduction(call.kind) && (Py_TYPE(args[4]) != reduce_op_type() || !read_index(args[4], num_ops, call.op))) {
        return false;
    }
    if (is_rooted(call.kind) && !read_index(args[5], world, call.root)) {
        return false;
    }
    if (call.kind == shm::Kind::barrier) {
        call.has_result = false;
        return true;
    }
    if ((call.kind == shm::Kind::reduce || call.kind == shm::Kind::gather) && call.root != rank) {
        call.has_result = false;
    }
    call.x = try_plain_array(args[2]);
    return call.x && (call.op < 0 || can_fold(call.x->dtype, static_cast<Op>(call.op))) && find_shape(call, world);
}

nb::object result_of(const PlainCall& call, PyObject* const* args) {
    if (!call.has_result) {
        return nb::none();
    }
    if (args[3] == Py_None) {
        return nb::steal(new_array_like(args[2], call.num_axes, call.shape));
    }
    const auto out = try_plain_array(args[3]);
    if (!out || !fits(*out, call) ||
        sharing(call.x->data, call.x->nbytes, out->data, out->nbytes) == Sharing::other) {
        return {};
    }
    return nb::borrow(args[3]);
}

void mark_progress_thread() { is_marked = true; }

bool is_progress_thread() { return is_marked; }

}  // namespace ferrodist::bind
