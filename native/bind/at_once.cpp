// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/at_once.hpp"

#include <cstring>
#include <optional>

#include "bind/arrays.hpp"
#include "bind/shared_group.hpp"
#include "bind/turn.hpp"
#include "hash.hpp"
#include "shm/collectives.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using shm::Kind;

thread_local bool is_progress_thread = false;

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

// One call on the short way, from the arguments to what they mean.
struct Call {
    Kind kind;
    int op = -1, root = -1;  // -1 where the kind has none
    std::optional<PlainArray> x{};
    int num_axes = 0;
    std::ptrdiff_t shape[max_axes] = {};  // of the result
    bool has_result = true;
};

bool is_reduction(Kind kind) {
    return kind == Kind::allreduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

// ferrodist.ReduceOp; kept for good.
PyTypeObject* reduce_op_type() {
    static PyObject* const type =
        nb::module_::import_("ferrodist.reduce_op").attr("ReduceOp").inc_ref().ptr();
    return reinterpret_cast<PyTypeObject*>(type);
}

bool is_rooted(Kind kind) {
    return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::gather;
}

// The shape of the result; false where the array cannot be cut among the ranks.
bool find_shape(Call& call, int world) {
    const PlainArray& x = *call.x;
    call.num_axes = x.num_axes;
    std::memcpy(call.shape, x.shape, static_cast<std::size_t>(x.num_axes) * sizeof(*x.shape));
    const bool is_cut = call.kind == Kind::reduce_scatter || call.kind == Kind::all_to_all;
    if (is_cut && world > 1) {
        if (x.num_axes == 0 || x.shape[0] % world != 0) {
            return false;
        }
        call.shape[0] = call.kind == Kind::all_to_all ? x.shape[0] : x.shape[0] / world;
    }
    if (call.kind == Kind::all_gather || call.kind == Kind::gather) {
        call.num_axes = std::max(x.num_axes, 1);
        call.shape[0] = (x.num_axes == 0 ? 1 : x.shape[0]) * world;
    }
    return true;
}

bool fits(const PlainArray& out, const Call& call) {
    return out.is_writable && out.dtype == call.x->dtype && out.num_axes == call.num_axes &&
           std::memcmp(out.shape, call.shape, static_cast<std::size_t>(call.num_axes) * sizeof(*call.shape)) == 0;
}

std::uint64_t fingerprint(const Call& call, bool reproducible) {
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

enum class Sharing { none, same, other };

Sharing sharing(const std::byte* x, std::size_t x_nbytes, const std::byte* out, std::size_t out_nbytes) {
    if (x_nbytes == 0 || out_nbytes == 0 || x + x_nbytes <= out || out + out_nbytes <= x) {
        return Sharing::none;
    }
    return x == out && x_nbytes == out_nbytes ? Sharing::same : Sharing::other;
}

bool read(Call& call, PyObject* const* args, int world) {
    // A member of ReduceOp is an int, but not every int is a member of it.
    if (is_reduction(call.kind) && (Py_TYPE(args[4]) != reduce_op_type() || !read_index(args[4], num_ops, call.op))) {
        return false;
    }
    if (is_rooted(call.kind) && !read_index(args[5], world, call.root)) {
        return false;
    }
    if (call.kind == Kind::barrier) {
        call.has_result = false;
        return true;
    }
    call.x = try_plain_array(args[2]);
    return call.x && (call.op < 0 || can_fold(call.x->dtype, static_cast<Op>(call.op))) && find_shape(call, world);
}

// The size of the whole array, or of one rank's block where it is cut.
std::size_t unit_nbytes(const Call& call, int world) {
    const bool is_cut = call.kind == Kind::reduce_scatter || call.kind == Kind::all_to_all;
    return is_cut ? call.x->nbytes / static_cast<std::size_t>(world) : call.x->nbytes;
}

PyObject* run(SharedGroup& self, const Call& call, PyObject* const* args, PyObject* result) {
    shm::Task task{call.kind};
    task.fingerprint = fingerprint(call, self.reproducible);
    task.root = std::max(call.root, 0);
    if (call.x) {
        task.dtype = call.x->dtype;
        task.op = call.op < 0 ? Op::sum : static_cast<Op>(call.op);
        task.source = call.x->data;
        task.nbytes = unit_nbytes(call, self.group->size());
    }
    if (result != Py_None) {
        task.target = try_plain_array(result)->data;
        task.in_place = task.target == task.source;
    }
    Turn turn(self, args);
    return turn.run(task) ? turn.end(result) : turn.fail();
}

// args: backend, kind, x, out, op, root
PyObject* call_at_once(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    SharedGroup& self = *nb::inst_ptr<SharedGroup>(self_object);
    const int world = self.group->size();
    int kind = 0;
    if (!can_go_at_once(self) || !self.turns.is_idle() ||
        !read_index(args[1], static_cast<int>(Kind::barrier) + 1, kind)) {
        return decline();
    }
    Call call{static_cast<Kind>(kind)};
    if (call.kind == Kind::scatter) {
        return scatter_at_once(self, args);
    }
    if (!read(call, args, world)) {
        return decline();
    }
    if ((call.kind == Kind::reduce || call.kind == Kind::gather) && call.root != self.group->rank()) {
        call.has_result = false;
    }
    if (!call.has_result) {
        return run(self, call, args, Py_None);
    }
    if (args[3] == Py_None) {
        const nb::object fresh = nb::steal(new_array_like(args[2], call.num_axes, call.shape));
        return run(self, call, args, fresh.ptr());
    }
    const auto out = try_plain_array(args[3]);
    if (!out || !fits(*out, call) ||
        sharing(call.x->data, call.x->nbytes, out->data, out->nbytes) == Sharing::other) {
        return decline();
    }
    return run(self, call, args, args[3]);
}

PyMethodDef definition = {"at_once", as_function<&call_at_once, 6>(), METH_FASTCALL,
                          "Do a call on plain arrays at once; NotImplemented sends it the general way."};

}  // namespace

nb::object bind_at_once(nb::handle shared_group) {
    return nb::steal(PyCFunction_New(&definition, shared_group.ptr()));
}

bool can_go_at_once(const SharedGroup& group) {
    return group.is_open && !is_progress_thread && !group.group->has_left() && !group.group->world().is_of_ancestor();
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

void mark_progress_thread() { is_progress_thread = true; }

}  // namespace ferrodist::bind
