// SPDX-License-Identifier: MIT OR Apache-2.0
// Meshes, groups over TCP, splits and plans for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bind/call_path.hpp"
#include "bind/flying_call.hpp"
#include "bind/gil.hpp"
#include "bind/messages.hpp"
#include "bind/net_arguments.hpp"
#include "bind/module.hpp"
#include "net/split.hpp"
#include "net/executor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using net::Status;
using net::Group;
using net::Mesh;
using net::Plan;

constexpr std::uint64_t any_sequence = std::numeric_limits<std::uint64_t>::max();

std::optional<nb::bytes> maybe_bytes(const std::optional<std::string>& text) {
    return text ? std::optional(nb::bytes(text->data(), text->size())) : std::nullopt;
}

// -- meshes ----------------------------------------------------------------------------------------

std::shared_ptr<Mesh> new_mesh(int rank, const std::vector<std::pair<int, nb::bytes>>& links, double heartbeat,
                               double heartbeat_timeout, std::uint64_t piece_nbytes) {
    std::vector<net::LinkSpec> specs;
    for (const auto& [socket, key] : links) {
        const Bytes session = bytes_of(key);
        std::vector<std::byte> own(session.begin(), session.end());
        require(socket < 0 || own.size() == net::FrameKey::session_nbytes, "a key has 32 bytes");
        own.resize(net::FrameKey::session_nbytes);
        specs.push_back({socket, std::move(own)});
    }
    require(rank >= 0 && static_cast<std::size_t>(rank) < specs.size(), "no such rank");
    require(piece_nbytes > 0, "a piece has at least one byte");
    return std::make_shared<Mesh>(rank, specs, net::MeshOptions{to_ns(heartbeat), to_ns(heartbeat_timeout), piece_nbytes});
}

TcpGroup* first_group(const std::shared_ptr<Mesh>& mesh) {
    std::vector<int> members(static_cast<std::size_t>(mesh->size()));
    std::iota(members.begin(), members.end(), 0);
    auto* const made = [&] {
        const net::Lock guard = mesh->lock();
        return new TcpGroup(std::make_shared<Group>(mesh, 0, std::move(members), nullptr));
    }();
    mesh->start();
    return made;
}

std::vector<std::tuple<bool, int, std::uint64_t, std::uint64_t>> stop_trace(Mesh& mesh) {
    std::vector<std::tuple<bool, int, std::uint64_t, std::uint64_t>> found;
    for (const net::Trace& one : mesh.stop_trace()) {
        found.emplace_back(one.is_sent, one.peer, one.sequence, one.nbytes);
    }
    return found;
}

// -- collectives -----------------------------------------------------------------------------------

std::shared_ptr<Plan> new_plan(nb::handle table, nb::handle ranges, nb::handle scratch, std::size_t dtype,
                               std::size_t op, std::uint64_t divisor, bool is_float32, std::optional<std::size_t> last_op,
                               const std::vector<int>& peers) {
    for (const std::size_t one : {op, last_op.value_or(op)}) {
        require(dtype < num_dtypes && one < num_ops && can_reduce(static_cast<DType>(dtype), static_cast<Op>(one)),
                "this op makes no sense for this dtype");
    }
    const View ints = readable(table), spans = readable(ranges), sizes = readable(scratch);
    const net::Reduction reduction{static_cast<DType>(dtype), static_cast<Op>(op), divisor, is_float32,
                                   last_op ? std::optional(static_cast<Op>(*last_op)) : std::nullopt};
    return std::make_shared<Plan>(
        std::span(static_cast<const std::int32_t*>(ints.data()), ints.nbytes() / 4),
        std::span(static_cast<const std::uint64_t*>(spans.data()), spans.nbytes() / 8),
        std::span(static_cast<const std::uint64_t*>(sizes.data()), sizes.nbytes() / 8), reduction, peers);
}

CallStatus execute(TcpGroup& self, const Plan& plan, nb::handle source, nb::handle target, bool in_place,
            std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline, bool in_background,
            nb::handle poll) {
    require(plan.num_ranks() <= self.group->size(), "a plan of another world");
    std::optional<View> input, output;
    net::Task task{nullptr, nullptr, in_place, sequence, fingerprint};
    if (!source.is_none()) {
        task.source = static_cast<const std::byte*>(input.emplace(readable(source)).data());
    }
    if (!target.is_none()) {
        task.target = static_cast<std::byte*>(output.emplace(writable(target)).data());
    }
    require((input ? input->nbytes() : 0) >= plan.source_nbytes(), "the source is too short");
    require((output ? output->nbytes() : 0) >= plan.target_nbytes(), "the target is too short");
    GilHook hook(poll.ptr(), in_background);
    const core::WaitOptions options = options_of(self, hook, Deadline(deadline), in_background);
    hook.let_go();
    const Status status = net::execute(*self.group, plan, task, options);
    hook.take_back();
    return CallStatus(status, hook);
}

CallStatus exchange(TcpGroup& self, std::uint32_t kind, int to, nb::handle outgoing, int peer, nb::handle incoming,
                std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline, bool in_background,
                nb::handle poll) {
    std::optional<View> out, in;
    if (!outgoing.is_none()) {
        require_peer(self, to);
        out.emplace(readable(outgoing));
    }
    if (!incoming.is_none()) {
        require_peer(self, peer);
        in.emplace(writable(incoming));
    }
    const net::Task task{nullptr, nullptr, false, sequence, fingerprint};
    GilHook hook(poll.ptr(), in_background);
    const core::WaitOptions options = options_of(self, hook, Deadline(deadline), in_background);
    hook.let_go();
    const Status status =
        net::exchange(*self.group, kind, out ? to : -1, out ? bytes_of(*out) : Bytes{}, in ? peer : -1,
                      in ? static_cast<std::byte*>(in->data()) : nullptr, in ? in->nbytes() : 0, task, options);
    hook.take_back();
    return CallStatus(status, hook);
}

std::pair<CallStatus, nb::list> exchange_descriptors(TcpGroup& self, std::uint64_t sequence,
                                                     const nb::bytes& descriptor, nb::handle deadline,
                                                     bool in_background, nb::handle poll) {
    GilHook hook(poll.ptr(), in_background);
    const core::WaitOptions options = options_of(self, hook, Deadline(deadline), in_background);
    std::vector<std::string> descriptors;
    hook.let_go();
    const Status status = self.group->exchange_descriptors(sequence, bytes_of(descriptor), options, descriptors);
    hook.take_back();
    nb::list found;
    for (const std::string& one : descriptors) {
        found.append(nb::bytes(one.data(), one.size()));
    }
    return {CallStatus(status, hook), found};
}

void add_settings(nb::class_<TcpGroup>& group) {
    group
        .def_prop_rw("leaves_deaths", [](const TcpGroup& self) { return self.group->leaves_deaths; },
                     [](TcpGroup& self, bool value) { self.group->leaves_deaths = value; },
                     "Whether it shows elsewhere if a rank that died is still needed.")
        .def_rw("is_open", &TcpGroup::is_open, "Whether calls may be made.")
        .def_rw("reproducible", &TcpGroup::reproducible, "What calls are fingerprinted with.")
        .def_rw("fuse_nbytes", &TcpGroup::fuse_nbytes, "Up to which size arrays of a tree travel together.")
        .def_rw("timeout_ns", &TcpGroup::timeout_ns, "How long a call may wait; 0 is for ever.")
        .def("set_patience", [](TcpGroup& self, double timeout, double late_timeout) {
            self.patience = patience_of(timeout, late_timeout);
        }, "timeout"_a, "late_timeout"_a, "Set how long a call waits for ranks that are alive and not stuck.");
}

void add_endings(nb::class_<TcpGroup>& group) {
    group
        .def("missing", [](TcpGroup& self) {
            const WithoutGil unlocked;
            return self.group->missing();
        }, "Ask all ranks, and list those that hold up the current call.")
        .def("last_call", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            const WithoutGil unlocked;
            return self.group->last_call(rank);
        }, "rank"_a, "Return sequence and kind of a rank's last call, as last heard.")
        .def("waited", [](TcpGroup& self, int rank, int for_rank) {
            require_rank(self, for_rank);
            const WithoutGil unlocked;
            return rank == self.group->rank() ? static_cast<double>(self.group->waited_ns(for_rank)) * 1e-9 : 0.0;
        }, "rank"_a, "for_rank"_a, "Return how long this rank has waited for another, in seconds.")
        .def("is_gone", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            const WithoutGil unlocked;
            const net::Lock guard = self.group->mesh().lock();
            return self.group->is_gone(rank);
        }, "rank"_a, "Tell whether a rank has left or died.")
        .def("loss_of", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            const WithoutGil unlocked;
            const net::Lock guard = self.group->mesh().lock();
            return static_cast<int>(self.group->loss(rank).code);
        }, "rank"_a, "Return the status code of a wait for a rank that is gone.")
        .def("leave_reason_of", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            std::optional<std::string> found;
            {
                const WithoutGil unlocked;
                found = self.group->leave_reason_of(rank);
            }
            return maybe_bytes(found);
        }, "rank"_a, "Return how a rank left, None if it did not say.")
        .def("flaw_of", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            const WithoutGil unlocked;
            return self.group->flaw_of(rank);
        }, "rank"_a, "Say what is wrong with the connection to a rank; empty if nothing is.")
        .def("group_error", [](TcpGroup& self, std::optional<std::uint64_t> sequence) {
            std::optional<std::string> found;
            {
                const WithoutGil unlocked;
                found = self.group->group_error(sequence.value_or(any_sequence));
            }
            return maybe_bytes(found);
        }, "sequence"_a.none(), "Return the group error that concerns a call, or any.")
        .def("set_error", [](TcpGroup& self, std::uint64_t sequence, const nb::bytes& text) {
            const WithoutGil unlocked;
            self.group->set_error(sequence, {text.c_str(), text.size()});
            return true;
        }, "sequence"_a, "text"_a, "Propose a group error; the first one on a call stands.")
        .def("announce_closing", [](TcpGroup& self) {
            const WithoutGil unlocked;
            self.group->announce_closing();
        }, "Say that no new calls come from this rank.")
        .def("leave", [](TcpGroup& self, const nb::bytes& leave_reason) {
            const std::uint64_t after = self.tickets.ended();
            const WithoutGil unlocked;
            self.group->leave({leave_reason.c_str(), leave_reason.size()}, after);
        }, "leave_reason"_a, "Say that nothing more comes from this rank, and how it left.")
        .def_prop_ro("has_left", [](TcpGroup& self) {
            const WithoutGil unlocked;
            return self.group->has_left();
        }, "Whether this rank has left.");
}

void add_mesh(nb::module_& module) {
    nb::class_<Mesh>(module, "Mesh", "A process's connections to all other ranks.")
        .def(nb::new_(&new_mesh), "rank"_a, "links"_a, "heartbeat"_a, "heartbeat_timeout"_a, "piece_nbytes"_a)
        .def("first_group", &first_group, nb::rv_policy::take_ownership, "Make the group of all.")
        .def("report", [](Mesh& self, std::string text) {
            const WithoutGil unlocked;
            self.report(std::move(text));
        }, "text"_a, "Keep what this process waits in for those who ask.")
        .def("report_of", [](Mesh& self, int rank) {
            require(rank >= 0 && rank < self.size(), "no such rank");
            std::string text;
            {
                const WithoutGil unlocked;
                text = self.report_of(rank);
            }
            // It may be cut in the middle of a letter.
            return nb::steal<nb::str>(
                PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
        }, "rank"_a, "Return what a process was last heard to wait in; empty if it did not.")
        .def("invitations_of", [](Mesh& self, int rank) {
            const WithoutGil unlocked;
            return self.invitations_of(rank);
        }, "rank"_a, "List the groups, as world ranks, that a process waits to join.")
        .def("start_trace", &Mesh::start_trace, "Begin to write down the pieces of collectives.")
        .def("stop_trace", &stop_trace, "Return the pieces since: is_sent, peer, sequence, nbytes.")
        .def("finish", [](Mesh& self, nb::handle deadline) {
            const Deadline limit(deadline);
            const WithoutGil unlocked;
            self.finish(limit.at_ns);
        }, "deadline"_a, "End all connections in order: what was sent arrives, unless the deadline comes first.")
        .def_prop_ro("sent_nbytes", &Mesh::sent_nbytes, "Bytes this process has sent.")
        .def_prop_ro("received_nbytes", &Mesh::received_nbytes, "Bytes this process has received.");
}

void add_group(nb::module_& module) {
    nb::class_<Plan>(module, "Plan", "The steps of one rank, where its cells lie, and how to reduce.")
        .def(nb::new_(&new_plan), "table"_a, "ranges"_a, "scratch_nbytes"_a, "dtype"_a, "op"_a, "divisor"_a,
             "is_float32"_a, "last_op"_a.none(), "peers"_a);
    nb::class_<TcpGroup> group(module, "TcpGroup", "Ranks that do collectives over TCP.");
    add_messages(group);
    add_settings(group);
    add_endings(group);
    group
        .def_prop_ro("tickets", [](TcpGroup& self) -> Tickets& { return self.tickets; },
                     nb::rv_policy::reference_internal, "The order of its calls.")
        .def_prop_ro("call_path", [](nb::handle self) { return bind_call_path<TcpGroup>(self); },
                     "The fast path of a call: (backend, kind, x, out, op, root).")
        .def_prop_ro("start_path", [](nb::handle self) { return bind_start_path<TcpGroup>(self); },
                     "The same in flight: (backend, kind, x, out, op, root) -> its Work.")
        .def("stop_progress", [](TcpGroup& self) {
            const WithoutGil unlocked;
            self.progress.stop();
        }, "End the thread that runs calls in flight; it begins none any more.")
        .def("start_prepared", [](nb::handle self, nb::handle backend, int kind, nb::handle run, nb::handle finish) {
            TcpGroup& group = nb::cast<TcpGroup&>(self);
            return start_prepared(group.tickets, group.progress, self, backend, kind, run, finish);
        }, "backend"_a, "kind"_a, "run"_a, "finish"_a,
             "Put a call in flight whose collectives run(ticket, in_background) does.")
        .def_prop_ro("is_stopping", [](TcpGroup& self) { return self.progress.is_stopping(); },
                     "Whether calls in flight are to end.")
        .def("enter", [](TcpGroup& self, std::uint32_t kind, std::uint64_t sequence, std::uint64_t fingerprint) {
            const WithoutGil unlocked;
            const net::Lock guard = self.group->mesh().lock();
            const Status status = self.group->enter(sequence, kind, fingerprint);
            self.group->set_waiting_for(net::waits_elsewhere);
            return static_cast<int>(status.code);
        }, "kind"_a, "sequence"_a, "fingerprint"_a,
             "Enter a call whose first part is done elsewhere; return a status code.")
        .def("expire", [](TcpGroup& self, nb::handle deadline) {
            core::ProgressHook nobody;
            const Deadline limit(deadline);
            const core::WaitOptions options{&nobody, limit.at_ns, core::no_spins, 0, 0, limit.patience};
            const Status status = [&] {
                const WithoutGil unlocked;
                net::Lock guard = self.group->mesh().lock();
                return self.group->expire(guard, options);
            }();
            return CallStatus(status);
        }, "deadline"_a, "Bar ranks from the current call, which is late; done if it goes on all the same.")
        .def_prop_ro("has_barred", [](TcpGroup& self) {
            const WithoutGil unlocked;
            const net::Lock guard = self.group->mesh().lock();
            return self.group->has_barred();
        }, "Whether the last call that was given up was for ranks that are barred from it.")
        .def("exit", [](TcpGroup& self) {
            const WithoutGil unlocked;
            const net::Lock guard = self.group->mesh().lock();
            self.group->exit();
        }, "Leave a call whose last part was done elsewhere.")
        .def("execute", &execute, "plan"_a, "source"_a.none(), "target"_a.none(), "in_place"_a, "sequence"_a,
             "fingerprint"_a, "deadline"_a, "in_background"_a, "poll"_a,
             "Do what a plan says; return its status.")
        .def("exchange", &exchange, "kind"_a, "to"_a, "outgoing"_a.none(), "peer"_a, "incoming"_a.none(),
             "sequence"_a, "fingerprint"_a, "deadline"_a, "in_background"_a, "poll"_a,
             "Send one piece of a collective and receive one at once; either may be None.")
        .def("exchange_descriptors", &exchange_descriptors, "sequence"_a, "descriptor"_a, "deadline"_a,
             "in_background"_a, "poll"_a,
             "Tell all ranks what this one has called; return a status, and what all have.");
    nb::class_<net::Split>(module, "TcpSplit", "Some ranks of a group on their way to be a group.")
        .def("__init__", [](net::Split* self, const TcpGroup& parent, std::vector<int> members,
                            std::uint64_t identity) {
            for (const int member : members) {
                require_rank(parent, member);
            }
            new (self) net::Split(parent.group, std::move(members), identity);
        }, "parent"_a, "members"_a, "identity"_a)
        .def("wait", [](net::Split& self, nb::handle deadline, nb::handle poll) {
            GilHook hook(poll.ptr());
            const Deadline limit(deadline);
            const core::WaitOptions options{&hook, limit.at_ns, core::no_spins, 0, 0, limit.patience};
            hook.let_go();
            const Status status = self.wait(options);
            hook.take_back();
            return CallStatus(status, hook);
        }, "deadline"_a, "poll"_a, "Wait for all members; return a status.")
        .def("absent", [](net::Split& self) {
            const WithoutGil unlocked;
            return self.absent();
        }, "List the members that have not come.")
        .def("group", [](const net::Split& self) { return new TcpGroup(self.group()); },
             nb::rv_policy::take_ownership, "Return the group, when all members have come.");
}

}  // namespace

void add_net(nb::module_& module) {
    add_mesh(module);
    add_group(module);
}

}  // namespace ferrodist::bind
