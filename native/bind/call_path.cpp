// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/call_path.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <array>
#include <memory>

#include "net/walker.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using shm::Kind;

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

// -- what differs between groups -----------------------------------------------------------------

int world_of(const SharedGroup& group) { return group.group->size(); }
int world_of(const TcpGroup& group) { return group.group->size(); }
shm::Spins spins_of(const SharedGroup& group) { return group.group->spins(); }
shm::Spins spins_of(const TcpGroup& group) { return group.group->mesh().spins(); }

// Below this a call in shared memory takes a microsecond or two: to let go of the GIL would cost more than it
// gives.
constexpr std::size_t smallest_without_gil = 32 * 1024;
bool lets_go_of_gil(const SharedGroup&, const Collective& one) { return one.nbytes >= smallest_without_gil; }
bool lets_go_of_gil(const TcpGroup&, const Collective&) { return true; }

// What a collective needs besides its buffers: over TCP a plan, which Python makes when it is first needed.
struct NoPlan {};
NoPlan plan_for(SharedGroup&, const Collective&, Arguments) { return {}; }

TcpGroup::KeptPlan plan_for(TcpGroup& group, const Collective& one, Arguments args) {
    const TcpGroup::PlanKey key{static_cast<int>(one.kind), static_cast<int>(one.dtype), static_cast<int>(one.op),
                                one.root, one.nbytes, group.reproducible};
    if (const auto found = group.plans.find(key); found != group.plans.end()) {
        return found->second;
    }
    if (group.plans.size() >= TcpGroup::most_plans) {
        group.plans.clear();
    }
    const nb::object made = nb::steal(PyObject_CallFunction(
        hooks().make_plan, "OiiiiK", args[arg_backend], static_cast<int>(one.kind), static_cast<int>(one.dtype),
        static_cast<int>(one.op), one.root, static_cast<unsigned long long>(one.nbytes)));
    if (!made.is_valid()) {
        throw nb::python_error();
    }
    const TcpGroup::KeptPlan kept{nb::cast<std::shared_ptr<net::Plan>>(made[0]), nb::cast<bool>(made[1])};
    group.plans[key] = kept;
    return kept;
}

bool can_alias(const NoPlan&) { return true; }
bool can_alias(const TcpGroup::KeptPlan& plan) { return plan.is_alias_safe; }

shm::Ending run(SharedGroup& group, const Collective& one, const NoPlan&, const shm::Patience& patience) {
    const bool is_cut = one.kind == Kind::reduce_scatter || one.kind == Kind::all_to_all;
    const shm::Task task{one.kind,
                         one.dtype,
                         one.op,
                         one.root,
                         one.source,
                         one.target,
                         is_cut ? one.nbytes / static_cast<std::size_t>(world_of(group)) : one.nbytes,
                         nullptr,
                         one.in_place,
                         one.fingerprint + static_cast<std::uint64_t>(one.index)};
    return shm::run(*group.group, task, patience);
}

shm::Ending run(TcpGroup& group, const Collective& one, const TcpGroup::KeptPlan& plan, const shm::Patience& patience) {
    patience.begin();
    return net::walk(*group.group, *plan.plan,
                     {one.source, one.target, one.in_place, patience.sequence, one.fingerprint}, patience);
}

// -- one call ------------------------------------------------------------------------------------

// A call that has its ticket, from its first collective to its result.
template <class Group>
class FastCall {
public:
    FastCall(Group& group, Arguments args, const CollectiveCall& call, std::uint64_t ticket)
        : group_(group), args_(args), call_(call), ticket_(ticket), watch_(hooks().on_wait, args[arg_backend]),
          patience_{&watch_, 0, spins_of(group), ticket, group.timeout_ns} {}

    // Does one collective; false if it failed.
    template <class Plan>
    bool run_collective(const Collective& one, const Plan& plan) {
        if (lets_go_of_gil(group_, one)) {
            watch_.let_go();
        }
        ++num_begun_;
        try {
            ending_ = run(group_, one, plan, patience_);
            watch_.take_back();
        } catch (const std::bad_alloc& error) {  // no room for what it needs besides the arrays
            watch_.take_back();
            PyErr_SetString(PyExc_MemoryError, error.what());
            keep_error();
        }
        return !ending_.failed();
    }

    // The call ends with the exception that is set.
    void keep_error() {
        watch_.keep_error();
        ending_ = {shm::Outcome::interrupted};
    }

    void end() {
        group_.tickets.end(ticket_);
        if (watch_.has_looked() && !nb::steal(PyObject_CallOneArg(hooks().on_wait_end, args_[arg_backend])).is_valid()) {
            throw nb::python_error();
        }
    }

    // Lets Python tell all ranks and raise; `part` is what the root of a scatter has told, or None.
    PyObject* fail(nb::handle part = nb::none()) {
        const nb::object error = watch_.error().is_valid() ? watch_.error() : nb::none();
        nb::object shape = nb::none();
        if (call_.has_input) {
            shape = nb::steal(PyTuple_New(call_.x.num_axes));
            for (int axis = 0; axis < call_.x.num_axes; ++axis) {
                PyTuple_SET_ITEM(shape.ptr(), axis, PyLong_FromSsize_t(call_.x.shape[axis]));
            }
        }
        return PyObject_CallFunction(hooks().on_error, "OiiOKiiOiiiOOO", args_[arg_backend],
                                     static_cast<int>(ending_.outcome), ending_.culprit, error.ptr(),
                                     static_cast<unsigned long long>(ticket_), static_cast<int>(call_.kind),
                                     static_cast<int>(call_.x.dtype), shape.ptr(), call_.op, call_.root, num_begun_,
                                     part.ptr(), args_[arg_x], args_[arg_out]);
    }

private:
    Group& group_;
    Arguments args_;
    const CollectiveCall& call_;
    std::uint64_t ticket_;
    GilWatch watch_;
    shm::Patience patience_;
    shm::Ending ending_;
    int num_begun_ = 0;
};

// -- scatter: the root tells dtype and shape of the parts, then the parts go out -----------------

// As _tell_part of ferrodist.collectives.uneven: dtype, number of axes, lengths.
struct Part {
    std::array<std::int64_t, 2 + max_axes> numbers{};

    Part() = default;
    Part(const ArrayView& x, int world) {
        numbers[0] = static_cast<std::int64_t>(x.dtype);
        numbers[1] = x.num_axes;
        std::copy(x.shape, x.shape + x.num_axes, numbers.begin() + 2);
        if (x.num_axes > 0) {
            numbers[2] /= world;
        }
    }

    bool is_possible() const {
        return numbers[0] >= 0 && numbers[0] < static_cast<std::int64_t>(num_dtypes) && numbers[1] >= 0 &&
               numbers[1] <= max_axes;
    }
    DType dtype() const { return static_cast<DType>(numbers[0]); }
    int num_axes() const { return static_cast<int>(numbers[1]); }
    const std::ptrdiff_t* shape() const { return reinterpret_cast<const std::ptrdiff_t*>(numbers.data() + 2); }
    bool is_form_of(const ArrayView& array) const {
        return array.dtype == dtype() && array.has_shape(num_axes(), shape());
    }
    nb::bytes bytes() const { return nb::bytes(numbers.data(), sizeof(numbers)); }
};
static_assert(sizeof(std::ptrdiff_t) == sizeof(std::int64_t));

// Whether what the root passes can be cut, and what the others pass can be read.
bool read_scatter(CollectiveCall& call, Arguments args, const Place& place) {
    const bool is_root = call.root == place.rank;
    call.has_input = args[arg_x] != Py_None;
    if ((is_root && !call.has_input) || (call.has_input && !call.x.read(args[arg_x]))) {
        return false;
    }
    if (is_root && place.world > 1 && (call.x.num_axes == 0 || call.x.shape[0] % place.world != 0)) {
        return false;
    }
    call.has_output = args[arg_out] != Py_None;
    if (!call.has_output) {
        return true;
    }
    if (!call.out.read(args[arg_out])) {
        return false;
    }
    const bool is_apart = call.x.begin >= call.out.data + call.out.nbytes || call.out.data >= call.x.end;
    return !is_root || (Part(call.x, place.world).is_form_of(call.out) && (is_apart || call.out.nbytes == 0));
}

// Makes room for this rank's part; false if what it passed does not fit.
bool place_part(CollectiveCall& call, const Part& part, bool is_root) {
    if (!part.is_possible() || (call.has_input && !is_root && !part.is_form_of(call.x))) {
        return false;
    }
    if (call.has_output) {
        return part.is_form_of(call.out);
    }
    call.has_output = true;
    return call.has_input ? call.out.make(call.x, part.num_axes(), part.shape())
                          : call.out.make_numpy(part.dtype(), part.num_axes(), part.shape());
}

template <class Group>
PyObject* scatter(Group& group, CollectiveCall& call, Arguments args, const Place& place) {
    if (!read_scatter(call, args, place)) {
        return decline();
    }
    const bool is_root = call.root == place.rank;
    Part part = is_root ? Part(call.x, place.world) : Part();
    auto* const numbers = reinterpret_cast<std::byte*>(part.numbers.data());
    const Collective tell{Kind::broadcast, DType::int64, Op::sum, call.root, numbers, numbers, sizeof(part.numbers),
                          true, call.fingerprint, 0};
    const auto first_plan = plan_for(group, tell, args);
    const std::uint64_t ticket = group.tickets.try_take();
    if (ticket == 0) {
        return decline();
    }
    FastCall<Group> running(group, args, call, ticket);
    if (!running.run_collective(tell, first_plan)) {
        return running.fail();
    }
    try {
        if (!place_part(call, part, is_root)) {
            return running.fail(part.bytes());
        }
        const Collective move{Kind::scatter, part.dtype(), Op::sum, call.root, is_root ? call.x.data : nullptr,
                              call.out.data, call.out.nbytes, false, call.fingerprint, 1};
        if (!running.run_collective(move, plan_for(group, move, args))) {
            return running.fail();
        }
    } catch (nb::python_error& error) {
        error.restore();
        running.keep_error();
        return running.fail();
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
        running.keep_error();
        return running.fail();
    }
    running.end();
    return call.out.finish(args[arg_x]).release().ptr();
}

template <class Group>
PyObject* call_collective(PyObject* self, Arguments args, Py_ssize_t) {
    Group& group = *nb::inst_ptr<Group>(self);
    if (!can_call(group)) {
        return decline();
    }
    const Place place{group.group->size(), group.group->rank(), group.reproducible};
    CollectiveCall call;
    if (!call.read(args, place)) {
        return decline();
    }
    if (call.kind == Kind::scatter) {
        return scatter(group, call, args, place);
    }
    const Collective one = call.collective();
    const auto plan = plan_for(group, one, args);
    if (one.in_place && !can_alias(plan)) {
        return decline();
    }
    const std::uint64_t ticket = group.tickets.try_take();
    if (ticket == 0) {
        return decline();
    }
    FastCall<Group> running(group, args, call, ticket);
    if (!running.run_collective(one, plan)) {
        return running.fail();
    }
    running.end();
    return call.has_output ? call.out.finish(args[arg_x]).release().ptr() : nb::none().release().ptr();
}

template <class Group>
PyMethodDef definition = {"call_path", as_function<&call_collective<Group>, num_arguments>(), METH_FASTCALL,
                          "Do a whole call; NotImplemented sends it the general path."};

}  // namespace

template <class Group>
nb::object bind_call_path(nb::handle group) {
    return nb::steal(PyCFunction_New(&definition<Group>, group.ptr()));
}
template nb::object bind_call_path<SharedGroup>(nb::handle group);
template nb::object bind_call_path<TcpGroup>(nb::handle group);

bool can_call(const SharedGroup& group) {
    return group.is_open && !is_progress_thread() && !group.group->has_left() && !group.group->world().is_of_ancestor();
}

bool can_call(const TcpGroup& group) {
    return group.is_open && !is_progress_thread() && !group.group->mesh().is_of_ancestor() && !group.group->has_left();
}

// -- hooks ---------------------------------------------------------------------------------------

namespace {

thread_local bool is_marked = false;

}  // namespace

Hooks& hooks() {
    static Hooks set;
    return set;
}

bool is_progress_thread() { return is_marked; }

void add_hooks(nb::module_& module) {
    using namespace nb::literals;
    module.def("set_hooks", [](nb::handle on_wait, nb::handle on_wait_end, nb::handle on_error, nb::handle make_plan) {
        hooks() = {on_wait.inc_ref().ptr(), on_wait_end.inc_ref().ptr(), on_error.inc_ref().ptr(),
                   make_plan.inc_ref().ptr()};
    }, "on_wait"_a, "on_wait_end"_a, "on_error"_a, "make_plan"_a, "Set what native code calls while it runs a call.");
    module.def("mark_progress_thread", [] { is_marked = true; },
               "Say that the calling thread runs callbacks, which must not communicate.");
}

}  // namespace ferrodist::bind
