// SPDX-License-Identifier: MIT OR Apache-2.0
// What differs between groups, and what Python sees of all of them.
#include "bind/groups.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <limits>

#include "bind/hooks.hpp"
#include "bind/messages.hpp"
#include "net/plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using shm::Kind;

constexpr std::uint64_t any_sequence = std::numeric_limits<std::uint64_t>::max();
// Below this a call in shared memory takes a microsecond or two: to let go of the GIL would cost more than it
// gives.
constexpr std::size_t smallest_without_gil = 32 * 1024;

}  // namespace

const KeptPlan& PlanCache::find(const Collective& one, PyObject* backend, KeptPlan (*keep)(nb::object)) {
    const Key key{static_cast<int>(one.kind), static_cast<int>(one.dtype), static_cast<int>(one.op), one.root,
                  one.nbytes, one.in_place, one.in_order};
    if (const auto found = plans_.find(key); found != plans_.end()) {
        return found->second;
    }
    const nb::object made = call_python_with(
        hooks().make_plan, "OiiiiKii", backend, static_cast<int>(one.kind), static_cast<int>(one.dtype),
        static_cast<int>(one.op), one.root, static_cast<unsigned long long>(one.nbytes), static_cast<int>(one.in_place),
        static_cast<int>(one.in_order));
    if (plans_.size() >= most_plans) {
        plans_.clear();
    }
    return plans_.insert_or_assign(key, keep(made)).first->second;
}

// -- in shared memory ------------------------------------------------------------------------------

bool SharedGroup::can_call() const {
    return calls->is_open && !is_progress_thread() && !group->has_left() && !group->world().is_of_ancestor();
}

bool SharedGroup::can_call_with(int peer) const {
    return can_call() && !group->has_error(any_sequence) && (peer < 0 || !group->has_left(peer));
}

bool SharedGroup::lets_go_of_gil(std::size_t nbytes) const { return nbytes >= smallest_without_gil; }

core::Status SharedGroup::run(const Collective& one, const KeptPlan&, const core::WaitOptions& options) {
    const bool is_cut = one.kind == Kind::reduce_scatter || one.kind == Kind::all_to_all;
    const shm::Task task{one.kind,
                         one.dtype,
                         one.op,
                         one.root,
                         one.source,
                         one.target,
                         is_cut ? one.nbytes / static_cast<std::size_t>(size) : one.nbytes,
                         nullptr,
                         one.in_place,
                         one.fingerprint + static_cast<std::uint64_t>(one.index)};
    return shm::run(*group, task, options);
}

// -- over TCP --------------------------------------------------------------------------------------

bool TcpGroup::can_call() const {
    return calls->is_open && !is_progress_thread() && !group->mesh().is_of_ancestor() && !group->has_left();
}

bool TcpGroup::can_call_with(int peer) const {
    if (!calls->is_open || is_progress_thread() || group->mesh().is_of_ancestor()) {
        return false;
    }
    const net::Lock guard = lock();
    const bool is_other = peer >= 0 && peer != rank;
    return !group->has_left(rank) && !(is_other && group->is_gone(peer)) && group->find_error(any_sequence) == nullptr;
}

bool TcpGroup::is_gone(int of) {
    const net::Lock guard = lock();
    return group->is_gone(of);
}

core::Status TcpGroup::expire(const core::WaitOptions& options) {
    net::Lock guard = lock();
    return group->expire(guard, options);
}

KeptPlan TcpGroup::plan_for(const Collective& one, PyObject* backend) {
    return plans.find(one, backend, [](nb::object made) {
        return KeptPlan{nb::cast<std::shared_ptr<net::Plan>>(made[0]), nb::cast<bool>(made[1])};
    });
}

core::Status TcpGroup::run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) {
    options.begin();
    return net::execute(*group, *static_cast<const net::Plan*>(plan.plan.get()),
                        {one.source, one.target, one.in_place, options.sequence, one.fingerprint}, options);
}

// -- in two levels ---------------------------------------------------------------------------------

KeptPlan HybridGroup::plan_for(const Collective& one, PyObject* backend) {
    return plans.find(one, backend, [](nb::object made) {
        return KeptPlan{nb::cast<std::shared_ptr<hybrid::Program>>(made)};  // it was made for its memory
    });
}

core::Status HybridGroup::run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) {
    const hybrid::Task task{one.source,       one.target,      static_cast<std::uint32_t>(one.kind),
                            options.sequence, one.fingerprint, one.index};
    return hybrid::execute(levels, *static_cast<const hybrid::Program*>(plan.plan.get()), task, options);
}

// -- for Python ------------------------------------------------------------------------------------

namespace {

std::optional<nb::bytes> maybe_bytes(const std::optional<std::string>& text) {
    return text ? std::optional(nb::bytes(text->data(), text->size())) : std::nullopt;
}

// What is asked of a group when a call fails, and how it ends.
void add_endings(nb::class_<MessageGroup, NativeGroup>& group) {
    group
        .def("missing", [](MessageGroup& self) { return without_gil([&] { return self.missing(); }); },
             "List the ranks that hold up the current call; over TCP all are asked.")
        .def("expire", [](MessageGroup& self, nb::handle deadline) {
            core::ProgressHook nobody;
            const Deadline limit(deadline);
            const core::WaitOptions options{&nobody, limit.at_ns, core::no_spins, 0, 0, limit.patience};
            return CallStatus(without_gil([&] { return self.expire(options); }));
        }, "deadline"_a, "Bar ranks from the current call, which is late; done if it goes on all the same.")
        .def("last_call", [](MessageGroup& self, int rank) {
            require_rank(self, rank);
            return without_gil([&] { return self.last_call(rank); });
        }, "rank"_a, "Return sequence and kind of a rank's last call, as far as is known.")
        .def("waited", [](MessageGroup& self, int rank, int for_rank) {
            require_rank(self, rank);
            require_rank(self, for_rank);
            return static_cast<double>(without_gil([&] { return self.waited_ns(rank, for_rank); })) * 1e-9;
        }, "rank"_a, "for_rank"_a, "Return how long a rank has waited for another, in seconds, as far as is known.")
        .def("is_gone", [](MessageGroup& self, int rank) {
            require_rank(self, rank);
            return without_gil([&] { return self.is_gone(rank); });
        }, "rank"_a, "Tell whether a rank has left or died.")
        .def("leave_reason_of", [](MessageGroup& self, int rank) {
            require_rank(self, rank);
            return maybe_bytes(without_gil([&] { return self.leave_reason_of(rank); }));
        }, "rank"_a, "Return how a rank left, None if it did not say.")
        .def("group_error", [](MessageGroup& self, std::optional<std::uint64_t> sequence) {
            return maybe_bytes(without_gil([&] { return self.group_error(sequence.value_or(any_sequence)); }));
        }, "sequence"_a.none(), "Return the group error that concerns a call, or any.")
        .def("set_error", [](MessageGroup& self, std::uint64_t sequence, const nb::bytes& text) {
            return without_gil([&] { return self.set_error(sequence, {text.c_str(), text.size()}); });
        }, "sequence"_a, "text"_a, "Set the group error, False if there is one; over TCP the first proposed stands.")
        .def("announce_closing", [](MessageGroup& self) { without_gil([&] { self.announce_closing(); }); },
             "Say that no new calls come from this rank.")
        .def("leave", [](MessageGroup& self, const nb::bytes& leave_reason) {
            without_gil([&] { self.leave({leave_reason.c_str(), leave_reason.size()}); });
        }, "leave_reason"_a, "Say that nothing more comes from this rank, and how it left.")
        .def_prop_ro("has_left", [](MessageGroup& self) { return without_gil([&] { return self.has_left(); }); },
                     "Whether this rank has left.");
}

void add_native_group(nb::module_& module) {
    nb::class_<NativeGroup>(module, "NativeGroup", "What all groups have: the calls of a group and how they wait.")
        .def_prop_ro("call_path", &bind_call_path, "The fast path of a call: (backend, kind, x, out, op, root, options).")
        .def_prop_ro("start_path", &bind_start_path,
                     "The same in flight: (backend, kind, x, out, op, root, options) -> its Work.")
        .def_prop_ro("tickets", [](NativeGroup& self) -> Tickets& { return self.calls->tickets; },
                     nb::rv_policy::reference_internal, "The order of its calls.")
        .def("stop_progress", [](NativeGroup& self) { without_gil([&] { self.calls->progress.stop(); }); },
             "End the thread that runs calls in flight; it begins none any more.")
        .def("start_prepared", [](nb::handle self, nb::handle backend, int kind, nb::handle running, nb::handle finish) {
            return start_prepared(*nb::cast<NativeGroup&>(self).calls, self, backend, kind, running, finish);
        }, "backend"_a, "kind"_a, "running"_a, "finish"_a, "Put a call in flight that Tickets.run does.")
        .def_prop_ro("is_stopping", [](NativeGroup& self) { return self.calls->progress.is_stopping(); },
                     "Whether calls in flight are to end.")
        .def("set_calls", [](NativeGroup& self, bool is_open, bool reproducible, std::size_t fuse_nbytes,
                             std::int64_t carried_nbytes, std::int64_t timeout_ns, double timeout, double late_timeout) {
            Calls& calls = *self.calls;
            calls.is_open = is_open;
            calls.reproducible = reproducible;
            calls.fuse_nbytes = fuse_nbytes;
            calls.carried_nbytes = carried_nbytes;
            calls.timeout_ns = timeout_ns;
            calls.patience = patience_of(timeout, late_timeout);
        }, "is_open"_a, "reproducible"_a, "fuse_nbytes"_a, "carried_nbytes"_a, "timeout_ns"_a, "timeout"_a, "late_timeout"_a,
             "Set whether calls may be made, how they are fingerprinted, and how long they wait.");
}

}  // namespace

void add_groups(nb::module_& module) {
    add_native_group(module);
    nb::class_<MessageGroup, NativeGroup> group(module, "MessageGroup",
                                                "A group whose ranks send each other messages, and how it ends.");
    add_messages(group);
    add_fast_messages(group);
    add_endings(group);
}

}  // namespace ferrodist::bind
