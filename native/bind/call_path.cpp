// SPDX-License-Identifier: MIT OR Apache-2.0
// The fast path of a collective: one native function from the caller's array to the result, for every kind of
// array and of group.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>

#include "bind/groups.hpp"
#include "bind/hooks.hpp"
#include "bind/profiler.hpp"
#include "bind/tree.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using shm::Kind;

constexpr std::size_t most_collectives = 4;  // of a call on the fast path: of a tree, one for each dtype

// -- what a caller chooses -------------------------------------------------------------------------

// How long a call may take, whether it reduces in rank order, and from where it is made.
struct Chosen {
    Place place;
    TimeLimit limit;
    nb::handle timeout;  // what was passed

    explicit Chosen(const NativeGroup& group)
        : place(group.place()), limit{group.calls->timeout_ns, group.calls->patience},
          timeout(hooks().default_timeout) {}

    // Reads the options of a call, a dict or None. False: the general path, which says what is wrong, if anything is.
    bool read(PyObject* options, const Calls& calls) {
        if (options == Py_None) {
            return true;
        }
        PyObject *name, *value;
        for (Py_ssize_t i = 0; PyDict_Next(options, &i, &name, &value) != 0;) {
            if (PyUnicode_CompareWithASCIIString(name, "timeout") == 0) {
                timeout = value;
                if (!limit.read(value, calls)) {
                    return false;
                }
            } else if (PyUnicode_CompareWithASCIIString(name, "reproducible") == 0) {
                if (value != Py_None && !PyBool_Check(value)) {
                    return false;
                }
                place.reproducible = value == Py_None ? place.reproducible : value == Py_True;
            } else if (value != Py_None || PyUnicode_CompareWithASCIIString(name, "algorithm") != 0) {
                return false;
            }
        }
        return true;
    }
};

// -- one call ------------------------------------------------------------------------------------

// Has Python settle with all ranks what became of a call, and ends its ticket; gives the error to raise.
nb::object settle_failure(Tickets& tickets, Arguments args, const Chosen& chosen, const CollectiveCall& call,
                          const core::Status& status, nb::object error, std::uint64_t ticket, int num_begun, nb::handle part, nb::handle site) {
    const auto number = static_cast<unsigned long long>(ticket);
    const int kind = static_cast<int>(call.kind);
    const InsideCall inside(tickets, ticket);
    nb::object found = caught([&] {
        const nb::object shape = call.has_input ? tuple_of(call.x.num_axes, call.x.shape) : nb::none();
        call_python_with(
            hooks().on_error, "OiiOKiiOiiiOOOOOi", args[arg_backend], static_cast<int>(status.code), status.failed_rank,
            error.is_valid() ? error.ptr() : Py_None, number, kind, static_cast<int>(call.x.dtype), shape.ptr(), call.op,
            call.root, num_begun, part.ptr(), args[arg_x], args[arg_out], site.ptr(), chosen.timeout.ptr(),
            static_cast<int>(chosen.place.reproducible));
    });
    found = insist(std::move(found), [&](PyObject* so_far) {
        return try_python_with(hooks().settle, "OiKO", args[arg_backend], kind, number, so_far);
    });
    tickets.end(ticket);
    return found;
}

// The hook of a call that has its ticket.
class TicketHook final : public GilHook {
public:
    TicketHook(const Tickets& tickets, std::uint64_t ticket, PyObject* backend, PyObject* site)
        : GilHook(hooks().on_wait, backend, site), tickets_(tickets), ticket_(ticket) {}
    bool poll() override {
        const InsideCall inside(tickets_, ticket_);
        return GilHook::poll();
    }

private:
    const Tickets& tickets_;
    const std::uint64_t ticket_;
};

// A call that has its ticket, from its first collective to its result.
class FastCall {
public:
    FastCall(NativeGroup& group, Arguments args, const Chosen& chosen, const CollectiveCall& call, std::uint64_t ticket)
        : group_(group), args_(args), chosen_(chosen), call_(call), ticket_(ticket),
          hook_(group.calls->tickets, ticket, args[arg_backend], Py_None),
          options_{&hook_, 0, group.spins, ticket, chosen.limit.timeout_ns, chosen.limit.patience} {}

    // Does one collective; false if it failed.
    bool run_collective(const Collective& one, const KeptPlan& plan) {
        if (group_.lets_go_of_gil(one.nbytes)) {
            hook_.let_go();
        }
        ++num_begun_;
        try {
            status_ = group_.run(one, plan, options_);
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
        group_.calls->tickets.end(ticket_);
        if (hook_.has_polled()) {
            checked(call_python(hooks().on_wait_end, args_[arg_backend]));
        }
    }

    // Settles it with all ranks and raises; `part` is what the root of a scatter has told, or None.
    PyObject* fail(nb::handle part = nb::none()) {
        return raise(settle_failure(group_.calls->tickets, args_, chosen_, call_, status_, hook_.error(), ticket_, num_begun_, part,
                                    nb::none()).ptr());
    }

private:
    NativeGroup& group_;
    Arguments args_;
    const Chosen& chosen_;
    const CollectiveCall& call_;
    std::uint64_t ticket_;
    TicketHook hook_;
    core::WaitOptions options_;
    core::Status status_;
    int num_begun_ = 0;
};

// A call of some collectives, if it is its turn at once; `finish` makes its result.
template <class Finish>
PyObject* do_all(NativeGroup& group, Arguments args, const Chosen& chosen, const CollectiveCall& call,
                 std::span<const Collective> collectives, const Finish& finish) {
    const ProfilerEvent event(call.kind);
    std::array<KeptPlan, most_collectives> plans;
    bool is_alias_safe = true;
    for (std::size_t i = 0; i < collectives.size(); ++i) {
        plans[i] = group.plan_for(collectives[i], args[arg_backend]);
        is_alias_safe = is_alias_safe && (!collectives[i].in_place || plans[i].is_alias_safe);
    }
    const std::uint64_t ticket = is_alias_safe ? group.calls->tickets.try_take() : 0;
    if (ticket == 0) {
        return decline();
    }
    FastCall running(group, args, chosen, call, ticket);
    for (std::size_t i = 0; i < collectives.size(); ++i) {
        if (!running.run_collective(collectives[i], plans[i])) {
            return running.fail();
        }
    }
    running.end();
    return finish().release().ptr();
}

// -- scatter: the root tells dtype and shape of the parts, then the parts go out -----------------

// As _Told.to_numbers in ferrodist.collectives.scatter: dtype, number of axes, lengths.
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

PyObject* scatter(NativeGroup& group, CollectiveCall& call, Arguments args, const Chosen& chosen) {
    const Place& place = chosen.place;
    try {
        if (!read_scatter(call, args, place)) {
            return decline();
        }
    } catch (const core::OutOfMemory&) {  // of a copy: the general path lets the others know
        return decline();
    }
    const ProfilerEvent event(call.kind);
    const bool is_root = call.root == place.rank;
    Part part = is_root ? Part(call.x, place.world) : Part();
    auto* const numbers = reinterpret_cast<std::byte*>(part.numbers.data());
    const Collective tell{Kind::broadcast, DType::int64, Op::sum, call.root, numbers, numbers, sizeof(part.numbers),
                          true, place.reproducible, call.fingerprint, 0};
    const KeptPlan first_plan = group.plan_for(tell, args[arg_backend]);
    const std::uint64_t ticket = group.calls->tickets.try_take();
    if (ticket == 0) {
        return decline();
    }
    FastCall running(group, args, chosen, call, ticket);
    if (!running.run_collective(tell, first_plan)) {
        return running.fail();
    }
    try {
        if (!place_part(call, part, is_root)) {
            return running.fail(part.bytes());
        }
        const Collective move{Kind::scatter, part.dtype(), Op::sum, call.root, is_root ? call.x.data : nullptr,
                              call.out.data, call.out.nbytes, false, place.reproducible, call.fingerprint, 1};
        if (!running.run_collective(move, group.plan_for(move, args[arg_backend]))) {
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

PyObject* call_tree(NativeGroup& group, Arguments args, const Chosen& chosen) {
    const Place& place = chosen.place;
    CollectiveCall call;
    Tree tree;
    if (args[arg_out] != Py_None || !call.read_options(args, place) ||
        (call.kind != Kind::allreduce && call.kind != Kind::broadcast) || !tree.read(args[arg_x], group.calls->fuse_nbytes) ||
        tree.num_dtypes() > most_collectives || !place.carries(tree.nbytes()) ||
        (call.op >= 0 && !tree.can_be_reduced(static_cast<Op>(call.op))) || !tree.make_results()) {
        return decline();
    }
    Fingerprint hash = begin_fingerprint(call.kind, call.op, call.root, place.reproducible);
    tree.add_to(hash);
    tree.pack();
    std::array<Collective, most_collectives> collectives;
    int count = 0;
    tree.for_each_dtype([&](DType dtype, const std::byte* packed, std::byte* output, std::size_t nbytes) {
        collectives[static_cast<std::size_t>(count)] = {
            call.kind, dtype,  call.op < 0 ? Op::sum : static_cast<Op>(call.op), std::max(call.root, 0), packed,
            output,    nbytes, false, place.reproducible, hash.value(), count};
        ++count;
    });
    const std::span<const Collective> all(collectives.data(), static_cast<std::size_t>(count));
    return do_all(group, args, chosen, call, all, [&] { return tree.finish(); });
}

PyObject* call_collective(PyObject* self, Arguments args) {
    NativeGroup& group = *nb::inst_ptr<NativeGroup>(self);
    Chosen chosen(group);
    if (!group.can_call() || !chosen.read(args[arg_options], *group.calls)) {
        return decline();
    }
    if (Tree::is_one(args[arg_x])) {
        return call_tree(group, args, chosen);
    }
    CollectiveCall call;
    if (!call.read(args, chosen.place)) {
        return decline();
    }
    if (call.kind == Kind::scatter) {
        return scatter(group, call, args, chosen);
    }
    const Collective one = call.collective(chosen.place);
    return do_all(group, args, chosen, call, {&one, 1},
                  [&] { return call.has_output ? call.out.finish(args[arg_x]) : nb::none(); });
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

constexpr std::size_t most_short_nbytes = 256 * 1024;

class FlyingCollective final : public FlyingCall {
public:
    FlyingCollective(PyObject* self, NativeGroup& group, Arguments args)
        : FlyingCall(*group.calls, group.listed_under(self), args[arg_backend]), group_(group), self_(nb::borrow(self)),
          site_(caller_site()), chosen_(group), background_(calls_.progress, args[arg_backend], site_.ptr()) {
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
        if (!chosen_.read(args_[arg_options], calls_) || !call_.read(args_, chosen_.place) || call_.kind == Kind::scatter) {
            return false;
        }
        // A deadline that passes while the call waits for its turn ends the one before it: the general path knows how.
        if (chosen_.timeout.ptr() != hooks().default_timeout && !calls_.tickets.is_idle()) {
            return false;
        }
        one_ = call_.collective(chosen_.place);
        plan_ = group_.plan_for(one_, args_[arg_backend]);
        is_short_ = one_.nbytes <= most_short_nbytes;
        return !one_.in_place || plan_.is_alias_safe;
    }

    bool meet() override {
        if (!is_short_ || InsideCall::number_of(calls_.tickets) != 0 || calls_.tickets.ended() + 1 != ticket_ ||
            !calls_.progress.claim(*this)) {
            return test();
        }
        const bool is_ready = without_gil([&] { return group_.await_ready(ticket_); });
        if (!is_ready) {
            calls_.progress.put_back(*this);
            return false;
        }
        run_here();
        return true;
    }

    bool has_failed() override { return is_cut_short_ || status_.failed(); }
    nb::object error() override { return error_.is_valid() ? error_ : left_error(); }
    nb::object result() override { return call_.has_output ? call_.out.finish(args_[arg_x]) : nb::none(); }
    shm::Kind kind() const { return call_.kind; }
    int traverse(visitproc visit, void* arg) const override {
        for (const nb::object& argument : kept_) {
            Py_VISIT(argument.ptr());
        }
        Py_VISIT(error_.ptr());
        return FlyingCall::traverse(visit, arg);
    }

private:
    void on_ticket() override {
        deadline_ns_ = chosen_.limit.timeout_ns == 0 ? 0 : core::now_ns() + chosen_.limit.timeout_ns;
    }

    void run() override {
        run_in_turn(background_, core::no_spins);
        if (background_.is_abandoned || calls_.progress.is_stopping()) {
            calls_.tickets.end(ticket_);  // the program ends, and the other ranks hear that of their own
        } else if (status_.failed() || background_.has_polled) {
            const WithGil gil;
            end(nb::steal(background_.error));
        } else {
            calls_.tickets.end(ticket_);
        }
        complete();
    }

    void run_here() override {
        nb::object error;
        {
            TicketHook hook(calls_.tickets, ticket_, args_[arg_backend], site_.ptr());
            hook.let_go();
            run_in_turn(hook, group_.spins);
            hook.take_back();
            background_.has_polled = hook.has_polled();
            error = hook.error();
        }
        end(error);
        complete();
    }

    // Waits for its turn, and does it.
    void run_in_turn(core::ProgressHook& hook, core::Spins* spins) {
        while (!calls_.tickets.wait(ticket_, poll_ns)) {
            if (!hook.poll()) {
                return interrupt();
            }
        }
        const core::WaitOptions options{&hook, deadline_ns_, spins, ticket_, 0, chosen_.limit.patience};
        try {
            status_ = group_.run(one_, plan_, options);
        } catch (const std::bad_alloc&) {
            is_out_of_memory_ = true;
            interrupt();
        }
    }

    void interrupt() { status_ = {core::StatusCode::interrupted}; }

    // With the GIL: ends the ticket of a call that was done, or failed.
    void end(nb::object error) {
        if (!status_.failed()) {
            calls_.tickets.end(ticket_);
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
        error_ = settle_failure(calls_.tickets, args_, chosen_, call_, status_, error, ticket_, 1, nb::none(), site_);
    }

    NativeGroup& group_;
    nb::object self_, site_;
    nb::object kept_[num_arguments];
    PyObject* args_[num_arguments];
    Chosen chosen_;
    CollectiveCall call_;
    Collective one_{Kind::barrier};
    KeptPlan plan_;
    BackgroundHook background_;
    std::int64_t deadline_ns_ = 0;
    core::Status status_;
    bool is_out_of_memory_ = false;
    nb::object error_;
};

PyObject* start_collective(PyObject* self, Arguments args) {
    NativeGroup& group = *nb::inst_ptr<NativeGroup>(self);
    if (!group.can_call()) {
        return decline();
    }
    core::HeldThread::set_owner(group.owner());
    auto call = std::make_unique<FlyingCollective>(self, group, args);
    if (!call->read()) {
        return decline();
    }
    const ProfilerEvent event(call->kind());
    const int kind = static_cast<int>(call->kind());
    return FlyingCall::start(kind, std::move(call));
}

PyMethodDef call_definition = {"call_path", as_function<&call_collective, num_arguments>(), METH_FASTCALL,
                               "Do a whole call; NotImplemented sends it the general path."};
PyMethodDef start_definition = {"start_path", as_function<&start_collective, num_arguments>(), METH_FASTCALL,
                                "Start a whole call; NotImplemented sends it the general path."};

// -- the way from the public functions ---------------------------------------------------------------

// Calls what a backend has under a name; NotImplemented where it has nothing.
nb::object call_attribute(nb::handle backend, PyObject* name, Arguments args) {
    const nb::object path = nb::steal(PyObject_GetAttr(backend.ptr(), name));
    if (!path.is_valid()) {  // it is no backend, which the general path says
        PyErr_Clear();
    }
    if (!path.is_valid() || path.is_none()) {
        return nb::steal(decline());
    }
    return nb::steal(PyObject_Vectorcall(path.ptr(), args, num_arguments, nullptr));
}

// args: kind, backend (None: that of the process), x, out, op, root, options. The names are of the attributes that are
// tried, in order.
template <const char* const&... names>
PyObject* find_and_call(PyObject*, Arguments args) {
    static PyObject* const paths[] = {PyUnicode_InternFromString(names)...};
    const nb::object backend =
        args[1] == Py_None ? nb::steal(call_python(hooks().current_backend)) : nb::borrow(args[1]);
    if (!backend.is_valid()) {
        return nullptr;
    }
    PyObject* const passed[num_arguments] = {backend.ptr(), args[0], args[2], args[3], args[4], args[5], args[6]};
    nb::object result;
    for (PyObject* const path : paths) {
        result = call_attribute(backend, path, passed);
        if (result.ptr() != Py_NotImplemented) {
            break;
        }
    }
    return result.release().ptr();
}

constexpr const char* call_path_name = "_call_path";
constexpr const char* start_path_name = "_start_path";
constexpr const char* engine_path_name = "_engine_path";

PyMethodDef path_functions[] = {
    {"fast_path", as_function<&find_and_call<call_path_name, engine_path_name>, num_arguments>(), METH_FASTCALL,
     "fast_path(kind, backend, x, out, op, root, options, /)\n--\n\n"
     "Do a call in native code: return its result, or NotImplemented for the general path."},
    {"fast_start", as_function<&find_and_call<start_path_name>, num_arguments>(), METH_FASTCALL,
     "fast_start(kind, backend, x, out, op, root, options, /)\n--\n\n"
     "Start a call in native code: return its Work, or NotImplemented for the general path."},
    {},
};

}  // namespace

nb::object bind_call_path(nb::handle group) { return checked(PyCFunction_New(&call_definition, group.ptr())); }
nb::object bind_start_path(nb::handle group) { return checked(PyCFunction_New(&start_definition, group.ptr())); }

void add_fast_path(nb::module_& module) { PyModule_AddFunctions(module.ptr(), path_functions); }

}  // namespace ferrodist::bind
