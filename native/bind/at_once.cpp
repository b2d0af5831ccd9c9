// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/at_once.hpp"

#include "bind/arrays.hpp"
#include "bind/plain_call.hpp"
#include "bind/shared_group.hpp"
#include "bind/turn.hpp"
#include "shm/collectives.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using shm::Kind;

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

// The size of the whole array, or of one rank's block where it is cut.
std::size_t unit_nbytes(const PlainCall& call, int world) {
    const bool is_cut = call.kind == Kind::reduce_scatter || call.kind == Kind::all_to_all;
    return is_cut ? call.x->nbytes / static_cast<std::size_t>(world) : call.x->nbytes;
}

PyObject* run(SharedGroup& self, const PlainCall& call, PyObject* const* args, PyObject* result) {
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
    Turn turn = begin_turn(self, args);
    return run_task(turn, self, task) ? turn.end(result) : turn.fail();
}

// args: backend, kind, x, out, op, root
PyObject* call_at_once(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    SharedGroup& self = *nb::inst_ptr<SharedGroup>(self_object);
    int kind = 0;
    if (!can_go_at_once(self) || !self.turns.is_idle() ||
        !read_index(args[1], static_cast<int>(Kind::barrier) + 1, kind)) {
        return decline();
    }
    PlainCall call{static_cast<Kind>(kind)};
    if (call.kind == Kind::scatter) {
        return scatter_at_once(self, args);
    }
    if (!read_plain_call(call, args, self.group->size(), self.group->rank())) {
        return decline();
    }
    const nb::object result = result_of(call, args);
    return result.is_valid() ? run(self, call, args, result.ptr()) : decline();
}

PyMethodDef definition = {"at_once", as_function<&call_at_once, 6>(), METH_FASTCALL,
                          "Do a call on plain arrays at once; NotImplemented sends it the general way."};

}  // namespace

nb::object bind_at_once(nb::handle shared_group) {
    return nb::steal(PyCFunction_New(&definition, shared_group.ptr()));
}

bool can_go_at_once(const SharedGroup& group) {
    return group.is_open && !is_progress_thread() && !group.group->has_left() && !group.group->world().is_of_ancestor();
}

Turn begin_turn(SharedGroup& group, PyObject* const* args) {
    return {group.turns, args, group.group->spins(), group.timeout_ns};
}

bool run_task(Turn& turn, SharedGroup& group, const shm::Task& task) {
    // Below this a call takes a microsecond or two: letting go of the GIL would cost more than it gives.
    constexpr std::size_t smallest_without_gil = 32 * 1024;
    return turn.run(task.nbytes >= smallest_without_gil,
                    [&](const shm::Patience& patience) { return shm::run(*group.group, task, patience); });
}

}  // namespace ferrodist::bind
