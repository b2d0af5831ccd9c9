// SPDX-License-Identifier: MIT OR Apache-2.0
// The short way over TCP: a call on plain arrays that has been planned before.
#include <algorithm>

#include "bind/arrays.hpp"
#include "bind/at_once.hpp"
#include "bind/plain_call.hpp"
#include "bind/tcp_group.hpp"
#include "bind/turn.hpp"
#include "net/walker.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

const TcpGroup::KeptPlan* find_plan(const TcpGroup& self, const PlainCall& call) {
    const int dtype = call.x ? static_cast<int>(call.x->dtype) : -1;
    const std::uint64_t nbytes = call.x ? call.x->nbytes : 0;
    const auto found = self.plans.find({static_cast<int>(call.kind), dtype, call.op, call.root, nbytes,
                                        self.reproducible});
    return found == self.plans.end() ? nullptr : &found->second;
}

// args: backend, kind, x, out, op, root
PyObject* call_at_once(PyObject* self_object, PyObject* const* args, Py_ssize_t) {
    TcpGroup& self = *nb::inst_ptr<TcpGroup>(self_object);
    int kind = 0;
    if (!self.is_open || is_progress_thread() || !self.turns.is_idle() || self.group->mesh().is_of_ancestor() ||
        self.group->has_left() || !read_index(args[1], static_cast<int>(shm::Kind::barrier) + 1, kind)) {
        return decline();
    }
    PlainCall call{static_cast<shm::Kind>(kind)};
    if (call.kind == shm::Kind::scatter || !read_plain_call(call, args, self.group->size(), self.group->rank())) {
        return decline();
    }
    const TcpGroup::KeptPlan* kept = find_plan(self, call);
    if (kept == nullptr) {
        return decline();
    }
    const nb::object result = result_of(call, args);
    if (!result.is_valid()) {
        return decline();
    }
    net::Task task{call.x ? call.x->data : nullptr, nullptr, false, 0, fingerprint(call, self.reproducible)};
    if (!result.is_none()) {
        task.target = try_plain_array(result.ptr())->data;
        task.is_in_place = task.target == task.source;
    }
    if (task.is_in_place && !kept->is_alias_safe) {
        return decline();
    }
    const std::shared_ptr<net::Plan> plan = kept->plan;  // another thread may drop it
    Turn turn(self.turns, args, self.group->mesh().spins(), self.timeout_ns);
    task.sequence = turn.number();
    const bool is_done = turn.run(true, [&](const shm::Patience& patience) {
        patience.begin();
        return net::walk(*self.group, *plan, task, patience);
    });
    return is_done ? turn.end(result.ptr()) : turn.fail();
}

PyMethodDef definition = {"at_once", as_function<&call_at_once, 6>(), METH_FASTCALL,
                          "Do a call on plain arrays at once; NotImplemented sends it the general way."};

}  // namespace

nb::object bind_tcp_at_once(nb::handle group) { return nb::steal(PyCFunction_New(&definition, group.ptr())); }

}  // namespace ferrodist::bind
