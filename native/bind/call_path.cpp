// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/call_path.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>

#include "bind/flying_call.hpp"
#include "bind/gil.hpp"
#include "bind/site.hpp"
#include "bind/tree.hpp"
#include "bind/work.hpp"
#include "core/memory.hpp"
#include "net/executor.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {

void set_memory_error(const std::bad_alloc& error, std::size_t nbytes) {
    const bool says_size = dynamic_cast<const core::OutOfMemory*>(&error) != nullptr;
    if (says_size) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } else {
        PyErr_Format(PyExc_MemoryError, "no memory for what a call on %zu bytes needs besides its arrays", nbytes);
    }
}

namespace {

using shm::Kind;

PyObject* decline() { Py_RETURN_NOTIMPLEMENTED; }

// -- what differs between groups -----------------------------------------------------------------

core::Spins* spins_of(const SharedGroup& group) { return group.group->spins(); }
core::Spins* spins_of(const TcpGroup& group) { return group.group->mesh().spins(); }
core::Spins* spins_of(const HybridGroup& group) { return spins_of(group.tcp); }

// Below this a call in shared memory takes a microsecond or two: to let go of the GIL would cost more than it
// gives.
constexpr std::size_t smallest_without_gil = 32 * 1024;
bool lets_go_of_gil(const SharedGroup&, const Collective& one) { return one.nbytes >= smallest_without_gil; }
bool lets_go_of_gil(const TcpGroup&, const Collective&) { return true; }
bool lets_go_of_gil(const HybridGroup&, const Collective&) { return true; }

// What a collective needs besides its buffers: over TCP a plan, in two levels a program.
struct NoPlan {};
NoPlan plan_for(SharedGroup&, const Collective&, Arguments) { return {}; }

TcpGroup::KeptPlan plan_for(TcpGroup& group, const Collective& one, Arguments args) {
    return group.plans.find(one, group.reproducible, args[arg_backend], [](const nb::object& made) {
        return TcpGroup::KeptPlan{nb::cast<std::shared_ptr<net::Plan>>(made[0]), nb::cast<bool>(made[1])};
    });
}

HybridGroup::KeptPlan plan_for(HybridGroup& group, const Collective& one, Arguments args) {
    return group.plans.find(one, group.reproducible, args[arg_backend], [](const nb::object& made) {
        return HybridGroup::KeptPlan(nb::cast<std::shared_ptr<hybrid::Program>>(made));
    });
}

bool can_alias(const NoPlan&) { return true; }
bool can_alias(const TcpGroup::KeptPlan& plan) { return plan.is_alias_safe; }
bool can_alias(const HybridGroup::KeptPlan&) { return true; }  // it was made for that

core::Status run(SharedGroup& group, const Collective& one, const NoPlan&, const core::WaitOptions& options) {
    const bool is_cut = one.kind == Kind::reduce_scatter || one.kind == Kind::all_to_all;
    const shm::Task task{one.kind,
                         one.dtype,
                         one.op,
                         one.root,
                         one.source,
                         one.target,
                         is_cut ? one.nbytes / static_cast<std::size_t>(group.group->size()) : one.nbytes,
                         nullptr,
                         one.in_place,
                         one.fingerprint + static_cast<std::uint64_t>(one.index)};
    return shm::run(*group.group, task, options);
}

core::Status run(TcpGroup& group, const Collective& one, const TcpGroup::KeptPlan& plan, const core::WaitOptions& options) {
    options.begin();
    return net::execute(*group.group, *plan.plan,
                     {one.source, one.target, one.in_place, options.sequence, one.fingerprint}, options);
}

core::Status run(HybridGroup& group, const Collective& one, const HybridGroup::KeptPlan& plan,
                const core::WaitOptions& options) {
    const hybrid::Task task{one.source,        one.target,      static_cast<std::uint32_t>(one.kind),
                            options.sequence, one.fingerprint, one.index};
    return hybrid::execute(group.levels, *plan, task, options);
}

// -- one call ------------------------------------------------------------------------------------

// Lets Python tell all ranks what became of a call, raise, and end its ticket.
PyObject* raise_failure(Arguments args, const CollectiveCall& call, const core::Status& status, nb::object error,
                        std::uint64_t ticket, int num_begun, nb::handle part, nb::handle site) {
    nb::object shape = nb::none();
    if (call.has_input) {
        shape = nb::steal(PyTuple_New(call.x.num_axes));
        for (int axis = 0; axis < call.x.num_axes; ++axis) {
            PyTuple_SET_ITEM(shape.ptr(), axis, PyLong_FromSsize_t(call.x.shape[axis]));
        }
    }
    return call_python_with(hooks().on_error, "OiiOKiiOiiiOOOO", args[arg_backend],
                                 static_cast<int>(status.code), status.failed_rank,
                                 error.is_valid() ? error.ptr() : Py_None, static_cast<unsigned long long>(ticket),
                                 static_cast<int>(call.kind), static_cast<int>(call.x.dtype), shape.ptr(), call.op,
                                 call.root, num_begun, part.ptr(), args[arg_x], args[arg_out], site.ptr());
}

// A call that has its ticket, from its first collective to its result.
template <class Group>
class FastCall {
public:
    FastCall(Group& group, Arguments args, const CollectiveCall& call, std::uint64_t ticket)
        : group_(group), args_(args), call_(call), ticket_(ticket), hook_(hooks().on_wait, args[arg_backend], Py_None),
          options_{&hook_, 0, spins_of(group), ticket, group.timeout_ns, group.patience} {}

    // Does one collective; false if it failed.
    template <class Plan>
    bool run_collective(const Collective& one, const Plan& plan) {
        if (lets_go_of_gil(group_, one)) {
            hook_.let_go();
        }
        ++num_begun_;
        try {
            status_ = run(group_, one, plan, options_);
            hook_.take_back();
        } catch (const std::bad_alloc& error) {  // no room for what it needs besides the arrays
            hook_.take_back();
            set_memory_error(error, one.nbytes);
            keep_error();
        }
        return !status_.failed();
    }

    // The call ends with the exception that is set.
    void keep_error() {
        hook_.keep_error();
        status_ = {core::StatusCode::interrupted};
    }

    void end() {
        group_.tickets.end(ticket_);
        if (hook_.has_polled() && !nb::steal(call_python(hooks().on_wait_end, args_[arg_backend])).is_valid()) {
            throw nb::python_error();
        }
    }

    // Lets Python tell all ranks and raise; `part` is what the root of a scatter has told, or None.
    PyObject* fail(nb::handle part = nb::none()) {
        return raise_failure(args_, call_, status_, hook_.error(), ticket_, num_begun_, part, nb::none());
    }

private:
    Group& group_;
    Arguments args_;
    const CollectiveCall& call_;
    std::uint64_t ticket_;
    GilHook hook_;
    core::WaitOptions options_;
    core::Status status_;
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
        return numbers[0] >= 0 && numbers[0] < static_cast<std::int64_t>(num_array_dtypes) && numbers[1] >= 0 &&
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
        set_memory_error(error);
        running.keep_error();
        return running.fail();
    }
    running.end();
    return call.out.finish(args[arg_x]).release().ptr();
}

// -- trees: small arrays travel as one -----------------------------------------------------------

template <class Group>
PyObject* call_tree(Group& group, Arguments args, const Place& place) {
    CollectiveCall call;
    Tree tree;
    if (args[arg_out] != Py_None || !call.read_options(args, place) ||
        (call.kind != Kind::allreduce && call.kind != Kind::broadcast) || !tree.read(args[arg_x], group.fuse_nbytes) ||
        (call.op >= 0 && (!can_reduce(tree.dtype(), static_cast<Op>(call.op)) || tree.has_integers())) ||
        !tree.make_results()) {
        return decline();
    }
    Fingerprint hash = begin_fingerprint(call.kind, call.op, call.root, group.reproducible);
    tree.add_to(hash);
    const std::byte* const packed = tree.pack();
    const Collective one{call.kind,     tree.dtype(), call.op < 0 ? Op::sum : static_cast<Op>(call.op),
                         std::max(call.root, 0), packed, tree.output(), tree.nbytes(), false, hash.value()};
    const auto plan = plan_for(group, one, args);
    const std::uint64_t ticket = group.tickets.try_take();
    if (ticket == 0) {
        return decline();
    }
    FastCall<Group> running(group, args, call, ticket);
    if (!running.run_collective(one, plan)) {
        return running.fail();
    }
    running.end();
    return tree.finish().release().ptr();
}

template <class Group>
PyObject* call_collective(PyObject* self, Arguments args, Py_ssize_t) {
    Group& group = *nb::inst_ptr<Group>(self);
    if (!can_call(group)) {
        return decline();
    }
    const Place place{group.group->size(), group.group->rank(), group.reproducible};
    if (Tree::is_one(args[arg_x])) {
        return call_tree(group, args, place);
    }
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

// -- in flight -----------------------------------------------------------------------------------

// The waits of a call that nobody waits for: without the GIL, but for a log line now and then.
class BackgroundHook final : public core::ProgressHook {
public:
    BackgroundHook(const Progress& progress, PyObject* backend, PyObject* site)
        : progress_(progress), backend_(backend), site_(site) {}

    bool poll() override {
        if (is_abandoned || progress_.is_stopping()) {
            return false;
        }
        if (++num_polls_ % polls_between_hooks != 0) {
            return true;
        }
        const WithGil gil;
        has_polled = true;
        PyObject* const answer = call_python(hooks().on_wait, backend_, site_);
        Py_XDECREF(answer);
        if (answer == nullptr) {
            error = fetch_exception();
        }
        return answer != nullptr;
    }

    // Pairs with nothing: it is only a wish, and the wait ends a look later at the latest.
    std::atomic<bool> is_abandoned{false};
    bool has_polled = false;
    PyObject* error = nullptr;

private:
    static constexpr int polls_between_hooks = 10;

    const Progress& progress_;
    PyObject *backend_, *site_;
    int num_polls_ = 0;
};

// The object that Works of a group are listed under.
template <class Group>
nb::handle listed_under(Group&, PyObject* self) {
    return self;
}
nb::handle listed_under(HybridGroup& group, PyObject*) { return group.kept[0]; }

template <class Group>
class FlyingCollective final : public FlyingCall {
public:
    FlyingCollective(PyObject* self, Group& group, Arguments args)
        : FlyingCall(group.tickets, group.progress, listed_under(group, self), args[arg_backend]), group_(group),
          self_(nb::borrow(self)), site_(caller_site()), background_(group.progress, args[arg_backend], site_.ptr()) {
        for (int i = 0; i < num_arguments; ++i) {
            kept_[i] = nb::borrow(args[i]);
            args_[i] = args[i];
        }
    }

    // Nobody drops a call in flight but the interpreter at its end.
    ~FlyingCollective() override {
        withdraw([this] { background_.is_abandoned = true; });
    }

    // Reads the arguments; false: the call takes the general path.
    bool read() {
        const Place place{group_.group->size(), group_.group->rank(), group_.reproducible};
        if (!call_.read(args_, place) || call_.kind == Kind::scatter) {
            return false;
        }
        one_ = call_.collective();
        plan_ = plan_for(group_, one_, args_);
        return !one_.in_place || can_alias(plan_);
    }

    void run() override {
        bool is_ours = true;
        while (is_ours && !group_.tickets.wait(ticket_, std::chrono::nanoseconds(poll_ns))) {
            is_ours = background_.poll();
        }
        is_ours ? execute(background_, core::no_spins) : interrupt();
        if (background_.is_abandoned || group_.progress.is_stopping()) {
            group_.tickets.end(ticket_);  // the program ends, and the other ranks hear that of their own
        } else if (status_.failed() || background_.has_polled) {
            const WithGil gil;
            end(nb::steal(background_.error));
        } else {
            group_.tickets.end(ticket_);
        }
        complete();
    }

    bool has_failed() override { return is_cut_short_ || status_.failed(); }
    nb::object error() override { return error_.is_valid() ? error_ : left_error(); }
    nb::object result() override { return call_.has_output ? call_.out.finish(args_[arg_x]) : nb::none(); }
    shm::Kind kind() const { return call_.kind; }

private:
    void on_ticket() override {
        deadline_ns_ = group_.timeout_ns == 0 ? 0 : core::now_ns() + group_.timeout_ns;
        patience_ = group_.patience;
    }

    void run_here() override {
        nb::object error;
        {
            GilHook hook(hooks().on_wait, args_[arg_backend], site_.ptr());
            hook.let_go();
            bool goes_on = true;
            while (goes_on && !group_.tickets.wait(ticket_, std::chrono::nanoseconds(poll_ns))) {
                goes_on = hook.poll();
            }
            goes_on ? execute(hook, spins_of(group_)) : interrupt();
            hook.take_back();
            background_.has_polled = hook.has_polled();
            error = hook.error();
        }
        end(error);
        complete();
    }

    void execute(core::ProgressHook& hook, core::Spins* spins) {
        const core::WaitOptions options{&hook, deadline_ns_, spins, ticket_, 0, patience_};
        try {
            status_ = bind::run(group_, one_, plan_, options);
        } catch (const std::bad_alloc&) {
            is_out_of_memory_ = true;
            interrupt();
        }
    }

    void interrupt() { status_ = {core::StatusCode::interrupted}; }

    // With the GIL: ends the ticket of a call that was done, or failed.
    void end(nb::object error) {
        if (!status_.failed()) {
            group_.tickets.end(ticket_);
            if (background_.has_polled) {
                nb::steal(call_python(hooks().on_wait_end, args_[arg_backend]));
                PyErr_Clear();
            }
            return;
        }
        if (is_out_of_memory_) {
            set_memory_error(std::bad_alloc(), one_.nbytes);
            error = nb::steal(fetch_exception());
        }
        Py_XDECREF(raise_failure(args_, call_, status_, error, ticket_, 1, nb::none(), site_));
        error_ = nb::steal(fetch_exception());
    }

    Group& group_;
    nb::object self_;
    nb::object site_;
    nb::object kept_[num_arguments];
    PyObject* args_[num_arguments];
    CollectiveCall call_;
    Collective one_{Kind::barrier};
    decltype(plan_for(std::declval<Group&>(), std::declval<const Collective&>(), Arguments{})) plan_;
    BackgroundHook background_;
    std::int64_t deadline_ns_ = 0;
    core::Patience patience_;
    core::Status status_;
    bool is_out_of_memory_ = false;
    nb::object error_;
};

template <class Group>
PyObject* start_collective(PyObject* self, Arguments args, Py_ssize_t) {
    Group& group = *nb::inst_ptr<Group>(self);
    if (!can_call(group)) {
        return decline();
    }
    auto call = std::make_unique<FlyingCollective<Group>>(self, group, args);
    if (!call->read()) {
        return decline();
    }
    const int kind = static_cast<int>(call->kind());
    return FlyingCall::start(kind, std::move(call));
}

template <class Group>
PyMethodDef start_definition = {"start_path", as_function<&start_collective<Group>, num_arguments>(), METH_FASTCALL,
                                "Start a whole call; NotImplemented sends it the general path."};

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
template nb::object bind_call_path<HybridGroup>(nb::handle group);

template <class Group>
nb::object bind_start_path(nb::handle group) {
    return nb::steal(PyCFunction_New(&start_definition<Group>, group.ptr()));
}
template nb::object bind_start_path<SharedGroup>(nb::handle group);
template nb::object bind_start_path<TcpGroup>(nb::handle group);
template nb::object bind_start_path<HybridGroup>(nb::handle group);

bool can_call(const SharedGroup& group) {
    return group.is_open && !is_progress_thread() && !group.group->has_left() && !group.group->world().is_of_ancestor();
}

bool can_call(const TcpGroup& group) {
    return group.is_open && !is_progress_thread() && !group.group->mesh().is_of_ancestor() && !group.group->has_left();
}

bool can_call(const HybridGroup& group) { return can_call(group.tcp) && can_call(group.shared); }

// -- the way from the public functions ---------------------------------------------------------------

namespace {

// args: kind, backend (None: that of the process), x, out, op, root
template <const char* const& name>
PyObject* find_and_call(PyObject*, Arguments args, Py_ssize_t) {
    static PyObject* const attribute = PyUnicode_InternFromString(name);
    const nb::object backend =
        args[1] == Py_None ? nb::steal(call_python(hooks().current_backend)) : nb::borrow(args[1]);
    if (!backend.is_valid()) {
        return nullptr;
    }
    const nb::object path = nb::steal(PyObject_GetAttr(backend.ptr(), attribute));
    if (!path.is_valid()) {  // it is no backend, which the general path says
        PyErr_Clear();
        return decline();
    }
    if (path.is_none()) {
        return decline();
    }
    PyObject* const passed[num_arguments] = {backend.ptr(), args[0], args[2], args[3], args[4], args[5]};
    return PyObject_Vectorcall(path.ptr(), passed, num_arguments, nullptr);
}

constexpr const char* call_path_name = "_call_path";
constexpr const char* start_path_name = "_start_path";

PyMethodDef path_functions[] = {
    {"fast_path", as_function<&find_and_call<call_path_name>, num_arguments>(), METH_FASTCALL,
     "fast_path(kind, backend, x, out, op, root, /)\n--\n\n"
     "Do a call in native code: return its result, or NotImplemented for the general path."},
    {"fast_start", as_function<&find_and_call<start_path_name>, num_arguments>(), METH_FASTCALL,
     "fast_start(kind, backend, x, out, op, root, /)\n--\n\n"
     "Start a call in native code: return its Work, or NotImplemented for the general path."},
    {},
};

}  // namespace

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
    PyModule_AddFunctions(module.ptr(), path_functions);
    module.def("set_hooks", [](nb::handle on_wait, nb::handle on_wait_end, nb::handle on_error, nb::handle make_plan,
                               nb::handle left_error, nb::handle current_backend) {
        hooks().on_wait = on_wait.inc_ref().ptr();
        hooks().on_wait_end = on_wait_end.inc_ref().ptr();
        hooks().on_error = on_error.inc_ref().ptr();
        hooks().make_plan = make_plan.inc_ref().ptr();
        hooks().left_error = left_error.inc_ref().ptr();
        hooks().current_backend = current_backend.inc_ref().ptr();
    }, "on_wait"_a, "on_wait_end"_a, "on_error"_a, "make_plan"_a, "left_error"_a, "current_backend"_a,
               "Set what native code calls while it runs a call.");
    module.def("set_message_hooks", [](nb::handle message_error, nb::handle make_received,
                                       nb::handle make_status, nb::handle on_message_interrupt,
                                       nb::handle on_message_wait, nb::handle on_message_wait_end,
                                       nb::handle any_source, nb::handle any_tag) {
        hooks().message_error = message_error.inc_ref().ptr();
        hooks().make_received = make_received.inc_ref().ptr();
        hooks().on_message_interrupt = on_message_interrupt.inc_ref().ptr();
        hooks().on_message_wait = on_message_wait.inc_ref().ptr();
        hooks().on_message_wait_end = on_message_wait_end.inc_ref().ptr();
        hooks().make_status = make_status.inc_ref().ptr();
        hooks().any_source = any_source.inc_ref().ptr();
        hooks().any_tag = any_tag.inc_ref().ptr();
    }, "message_error"_a, "make_received"_a, "make_status"_a, "on_message_interrupt"_a, "on_message_wait"_a,
               "on_message_wait_end"_a, "any_source"_a, "any_tag"_a,
               "Set what native code calls for point-to-point calls.");
    module.def("set_work_hooks", [](nb::handle start_callbacks, nb::handle check_wait, nb::handle on_unasked_error) {
        hooks().start_callbacks = start_callbacks.inc_ref().ptr();
        hooks().check_wait = check_wait.inc_ref().ptr();
        hooks().on_unasked_error = on_unasked_error.inc_ref().ptr();
    }, "start_callbacks"_a, "check_wait"_a, "on_unasked_error"_a, "Set what native code calls for calls in flight.");
    module.def("mark_progress_thread", [] {
        is_marked = true;
        core::HeldThread::exempt_this_thread();
    },
               "Say that the calling thread runs callbacks, which must not communicate.");
}

}  // namespace ferrodist::bind
