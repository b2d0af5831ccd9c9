// SPDX-License-Identifier: MIT OR Apache-2.0
// Meshes, groups over TCP, splits and plans for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/groups.hpp"
#include "bind/hooks.hpp"
#include "net/plan.hpp"
#include "net/split.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using net::Mesh;
using net::Plan;

// -- meshes ----------------------------------------------------------------------------------------

std::shared_ptr<Mesh> new_mesh(int rank, const std::vector<std::tuple<int, nb::bytes, int>>& links, double heartbeat,
                               double heartbeat_timeout, std::uint64_t piece_nbytes, bool is_of_thread) {
    std::vector<net::LinkSpec> specs;
    for (const auto& [socket, key, watch] : links) {
        const Bytes session = bytes_of(key);
        std::vector<std::byte> own(session.begin(), session.end());
        require(socket < 0 || own.size() == net::FrameKey::session_nbytes, "a key has 32 bytes");
        own.resize(net::FrameKey::session_nbytes);
        specs.push_back({socket, std::move(own), watch});
    }
    require(rank >= 0 && static_cast<std::size_t>(rank) < specs.size(), "no such rank");
    require(piece_nbytes > 0, "a piece has at least one byte");
    net::MeshOptions options{to_ns(heartbeat), to_ns(heartbeat_timeout), piece_nbytes};
    options.is_of_thread = is_of_thread;
    return std::make_shared<Mesh>(rank, specs, options);
}

TcpGroup* first_group(const std::shared_ptr<Mesh>& mesh) {
    std::vector<int> members(static_cast<std::size_t>(mesh->size()));
    std::iota(members.begin(), members.end(), 0);
    auto* const made = [&] {
        const net::Lock guard = mesh->lock();
        return new TcpGroup(std::make_shared<net::Group>(mesh, 0, std::move(members), nullptr));
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
        std::span(reinterpret_cast<const std::int32_t*>(ints.data()), ints.nbytes() / 4),
        std::span(reinterpret_cast<const std::uint64_t*>(spans.data()), spans.nbytes() / 8),
        std::span(reinterpret_cast<const std::uint64_t*>(sizes.data()), sizes.nbytes() / 8), reduction, peers);
}

CallStatus execute(TcpGroup& self, const Plan& plan, nb::handle source, nb::handle target, bool in_place,
                   std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline, bool in_background,
                   nb::handle poll) {
    require(plan.num_ranks() <= self.size, "a plan of another world");
    const View input = readable_if(source), output = writable_if(target);
    require(input.nbytes() >= plan.source_nbytes(), "the source is too short");
    require(output.nbytes() >= plan.target_nbytes(), "the target is too short");
    const net::Task task{input.data(), output.data(), in_place, sequence, fingerprint};
    return wait_without_gil({deadline, in_background, poll}, self.spins, 0, [&](const core::WaitOptions& options) {
        return net::execute(*self.group, plan, task, options);
    });
}

CallStatus exchange(TcpGroup& self, std::uint32_t kind, int to, nb::handle outgoing, int peer, nb::handle incoming,
                    std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline, bool in_background,
                    nb::handle poll) {
    const auto peer_of = [&](nb::handle memory, int rank) {
        require(memory.is_none() || (rank >= 0 && rank < self.size && rank != self.rank), "no such peer");
        return memory.is_none() ? -1 : rank;
    };
    const int dst = peer_of(outgoing, to), src = peer_of(incoming, peer);
    const View out = readable_if(outgoing), in = writable_if(incoming);
    const net::Task task{nullptr, nullptr, false, sequence, fingerprint};
    return wait_without_gil({deadline, in_background, poll}, self.spins, 0, [&](const core::WaitOptions& options) {
        return net::exchange(*self.group, kind, dst, out.bytes(), src, in.data(), in.nbytes(), task, options);
    });
}

std::pair<CallStatus, nb::list> exchange_descriptors(TcpGroup& self, std::uint64_t sequence,
                                                     const nb::bytes& descriptor, nb::handle deadline,
                                                     bool in_background, nb::handle poll) {
    std::vector<std::string> descriptors;
    const CallStatus status =
        wait_without_gil({deadline, in_background, poll}, self.spins, 0, [&](const core::WaitOptions& options) {
            return self.group->exchange_descriptors(sequence, bytes_of(descriptor), options, descriptors);
        });
    nb::list found;
    for (const std::string& one : descriptors) {
        found.append(nb::bytes(one.data(), one.size()));
    }
    return {status, found};
}

void add_mesh(nb::module_& module) {
    nb::class_<Mesh>(module, "Mesh", "A process's connections to all other ranks.")
        .def(nb::new_(&new_mesh), "rank"_a, "links"_a, "heartbeat"_a, "heartbeat_timeout"_a, "piece_nbytes"_a,
             "is_of_thread"_a = false)
        .def("first_group", &first_group, nb::rv_policy::take_ownership, "Make the group of all.")
        .def("report", [](Mesh& self, std::string text) {
            without_gil([&] { self.report(std::move(text)); });
        }, "text"_a, "Keep what this process waits in for those who ask.")
        .def("report_of", [](Mesh& self, int rank) {
            require(rank >= 0 && rank < self.size(), "no such rank");
            const std::string text = without_gil([&] { return self.report_of(rank); });
            // It may be cut in the middle of a letter.
            return nb::steal<nb::str>(
                PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
        }, "rank"_a, "Return what a process was last heard to wait in; empty if it did not.")
        .def("invitations_of", [](Mesh& self, int rank) {
            return without_gil([&] { return self.invitations_of(rank); });
        }, "rank"_a, "List the groups, as world ranks, that a process waits to join.")
        .def("start_trace", &Mesh::start_trace, "Begin to write down the pieces of collectives.")
        .def("stop_trace", &stop_trace, "Return the pieces since: is_sent, peer, sequence, nbytes.")
        .def("finish", [](Mesh& self, nb::handle deadline) {
            const Deadline limit(deadline);
            without_gil([&] { self.finish(limit.at_ns); });
        }, "deadline"_a, "End all connections in order: what was sent arrives, unless the deadline comes first.")
        .def_prop_ro("sent_nbytes", &Mesh::sent_nbytes, "Bytes this process has sent.")
        .def_prop_ro("received_nbytes", &Mesh::received_nbytes, "Bytes this process has received.");
}

void add_group(nb::module_& module) {
    nb::class_<Plan>(module, "Plan", "The steps of one rank, where its cells lie, and how to reduce.")
        .def(nb::new_(&new_plan), "table"_a, "ranges"_a, "scratch_nbytes"_a, "dtype"_a, "op"_a, "divisor"_a,
             "is_float32"_a, "last_op"_a.none(), "peers"_a);
    nb::class_<TcpGroup, MessageGroup>(module, "TcpGroup", "Ranks that do collectives over TCP.")
        .def_prop_rw("leaves_deaths", [](const TcpGroup& self) { return self.group->leaves_deaths; },
                     [](TcpGroup& self, bool value) { self.group->leaves_deaths = value; },
                     "Whether it shows elsewhere if a rank that died is still needed.")
        .def("give_up_split", [](TcpGroup& self, const nb::bytes& text) {
            const std::string_view error(text.c_str(), text.size());
            without_gil([&] { self.group->give_up_split(error); });
        }, "text"_a, "End a group that not all members have yet, with this group error.")
        .def("loss_of", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            return static_cast<int>(without_gil([&] {
                const net::Lock guard = self.lock();
                return self.group->loss(rank).code;
            }));
        }, "rank"_a, "Return the status code of a wait for a rank that is gone.")
        .def("flaw_of", [](TcpGroup& self, int rank) {
            require_rank(self, rank);
            return without_gil([&] { return self.group->flaw_of(rank); });
        }, "rank"_a, "Say what is wrong with the connection to a rank; empty if nothing is.")
        .def("enter", [](TcpGroup& self, std::uint32_t kind, std::uint64_t sequence, std::uint64_t fingerprint) {
            const WithoutGil unlocked;
            const net::Lock guard = self.lock();
            const core::Status status = self.group->enter(sequence, kind, fingerprint);
            self.group->set_waiting_for(net::waits_elsewhere);
            return static_cast<int>(status.code);
        }, "kind"_a, "sequence"_a, "fingerprint"_a,
             "Enter a call whose first part is done elsewhere; return a status code.")
        .def_prop_ro("has_barred", [](TcpGroup& self) {
            const WithoutGil unlocked;
            const net::Lock guard = self.lock();
            return self.group->has_barred();
        }, "Whether the last call that was given up was for ranks that are barred from it.")
        .def("exit", [](TcpGroup& self) {
            const WithoutGil unlocked;
            const net::Lock guard = self.lock();
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
}

}  // namespace

void add_net(nb::module_& module) {
    add_mesh(module);
    add_group(module);
    using TcpSplitting = Splitting<TcpGroup, net::Split>;
    add_split<TcpGroup, net::Split>(module, "TcpSplit")
        .def("give_up", [](TcpSplitting& self, const nb::bytes& text) {
            const std::string_view error(text.c_str(), text.size());
            without_gil([&] { self.begun().give_up(error); });
        }, "text"_a, "Let this group error end the group for members that have it already.")
        .def_prop_ro("error", [](TcpSplitting& self) {
            const auto found = without_gil([&] { return self.begun().group()->own_error(); });
            return found ? nb::object(nb::bytes(found->data(), found->size())) : nb::none();
        }, "The group error of a member that has given up, or None.");
}

}  // namespace ferrodist::bind
