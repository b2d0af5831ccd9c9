// SPDX-License-Identifier: MIT OR Apache-2.0
// Arenas, worlds, groups and splits for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bind/status.hpp"
#include "bind/arrays.hpp"
#include "bind/buffers.hpp"
#include "bind/call_path.hpp"
#include "bind/flying_call.hpp"
#include "bind/gil.hpp"
#include "bind/gil_hook.hpp"
#include "bind/items.hpp"
#include "bind/messages.hpp"
#include "bind/module.hpp"
#include "bind/shared_group.hpp"
#include "shm/collectives.hpp"
#include "shm/split.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using shm::Arena;
using core::Status;
using shm::Group;
using shm::Split;
using shm::World;

constexpr std::uint64_t any_sequence = std::numeric_limits<std::uint64_t>::max();

// -- arenas and worlds -------------------------------------------------------------------------------

std::shared_ptr<Arena> new_arena(int rank, std::size_t world_size, std::size_t nbytes) {
    return shm::make_arena(rank == 0 ? shm::GroupLayout::nbytes(world_size) : 0, nbytes);
}

shm::Peer map_peer(const Arena& own, bool is_own, int arena_fd, int watch_fd) {
    if (is_own) {
        return {own.base(), own.nbytes(), -1, nullptr};
    }
    auto mapping = std::make_shared<const shm::Mapping>(arena_fd);
    return {mapping->base(), mapping->nbytes(), watch_fd, mapping};
}

std::shared_ptr<World> new_world(int rank, const std::shared_ptr<Arena>& arena,
                                 const std::vector<std::pair<int, int>>& fds, double heartbeat,
                                 double heartbeat_timeout) {
    std::vector<shm::Peer> peers;
    for (std::size_t peer = 0; peer < fds.size(); ++peer) {
        const bool is_own = peer == static_cast<std::size_t>(rank);
        peers.push_back(map_peer(*arena, is_own, fds[peer].first, fds[peer].second));
    }
    return std::make_shared<World>(rank, arena, std::move(peers), to_ns(heartbeat), to_ns(heartbeat_timeout));
}

SharedGroup* first_group(const std::shared_ptr<World>& world) {
    std::vector<int> members(static_cast<std::size_t>(world->size()));
    std::iota(members.begin(), members.end(), 0);
    std::byte* block = world->peer(0).at(shm::first_block, shm::GroupLayout::nbytes(members.size()));
    if (block == nullptr) {
        throw std::runtime_error("the arena of rank 0 has no room for its group");
    }
    const auto own = world->rank() == 0 ? std::optional(shm::first_block) : std::nullopt;
    return new SharedGroup(std::make_shared<Group>(world, members, world->rank(), block, own, nullptr));
}

// -- calls -----------------------------------------------------------------------------------------

// The lengths of blocks in bytes, from counts of elements.
std::vector<std::uint64_t> block_nbytes(nb::handle counts, std::size_t itemsize) {
    std::vector<std::uint64_t> blocks;
    for (PyObject* count : Items(nb::cast<nb::sequence>(counts))) {
        blocks.push_back(nb::cast<std::uint64_t>(nb::handle(count)) * itemsize);
    }
    return blocks;
}

void require(bool is_right, const char* problem) {
    if (!is_right) {
        throw nb::value_error(problem);
    }
}

CallStatus run_collective(SharedGroup& self, std::uint32_t kind, std::size_t dtype, std::size_t op, int root,
                      nb::handle source, nb::handle target, std::size_t count, nb::handle counts,
                      bool in_place, std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline,
                      bool in_background, nb::handle poll) {
    require(kind < shm::num_kinds, "unknown kind");
    require(dtype < num_dtypes, "unknown dtype");
    require(op < num_ops && can_reduce(static_cast<DType>(dtype), static_cast<Op>(op)),
            "this op makes no sense for this dtype");
    require(root >= 0 && root < self.group->size(), "no such root");
    std::optional<View> input, output;
    shm::Task task{static_cast<shm::Kind>(kind)};
    if (!source.is_none()) {
        task.source = static_cast<const std::byte*>(input.emplace(readable(source)).data());
    }
    if (!target.is_none()) {
        task.target = static_cast<std::byte*>(output.emplace(writable(target)).data());
    }
    std::vector<std::uint64_t> blocks;
    task.dtype = static_cast<DType>(dtype);
    if (!counts.is_none()) {
        blocks = block_nbytes(counts, item_size(task.dtype));
        task.blocks = blocks.data();
    }
    task.op = static_cast<Op>(op);
    task.root = root;
    task.nbytes = count * item_size(task.dtype);
    task.in_place = in_place;
    task.fingerprint = fingerprint;
    GilHook hook(poll.ptr(), in_background);
    const Deadline limit(deadline);
    const core::WaitOptions options{&hook, limit.at_ns, in_background ? core::no_spins : self.group->spins(), sequence, 0,
                                    limit.patience};
    hook.let_go();
    const Status status = shm::run(*self.group, task, options);
    hook.take_back();
    return CallStatus(status, hook);
}

// -- what errors tell ------------------------------------------------------------------------------

std::vector<int> missing(const SharedGroup& self) {
    std::vector<int> ranks;
    for (int rank = 0; rank < self.group->size(); ++rank) {
        if (self.group->is_missing(rank)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

// Sequence and kind of the last call a rank has entered; zero if none.
std::pair<std::uint64_t, std::uint32_t> last_call(const SharedGroup& self, int rank) {
    const auto& layout = self.group->layout();
    const shm::Slot& even = layout.slot(static_cast<std::size_t>(rank), 0);
    const shm::Slot& odd = layout.slot(static_cast<std::size_t>(rank), 1);
    const shm::Slot& later = even.sequence > odd.sequence ? even : odd;
    return {later.sequence, later.kind};
}

double waited(const SharedGroup& self, std::size_t rank, std::size_t for_rank) {
    // Relaxed: a count that its rank adds to.
    return static_cast<double>(
               self.group->layout().waited(rank, for_rank).load(std::memory_order_relaxed)) * 1e-9;
}

std::optional<nb::bytes> group_error(const SharedGroup& self, std::optional<std::uint64_t> sequence) {
    const auto found = self.group->group_error(sequence.value_or(any_sequence));
    return found ? std::optional(nb::bytes(found->data(), found->size())) : std::nullopt;
}

std::optional<nb::bytes> leave_reason_of(const SharedGroup& self, int rank) {
    const auto found = self.group->leave_reason_of(rank);
    return found ? std::optional(nb::bytes(found->data(), found->size())) : std::nullopt;
}

// -- splitting -------------------------------------------------------------------------------------

CallStatus wait_for_members(Split& self, nb::handle deadline, nb::handle poll) {
    GilHook hook(poll.ptr());
    const Deadline limit(deadline);
    const core::WaitOptions options{&hook, limit.at_ns, core::no_spins, 0, 0, limit.patience};
    hook.let_go();
    const Status status = self.wait(options);
    hook.take_back();
    return CallStatus(status, hook);
}

void add_world(nb::module_& module) {
    nb::class_<Arena>(module, "Arena", "Memory that this process shows to the other ranks of its host.")
        .def(nb::new_(&new_arena), "rank"_a, "world_size"_a, "nbytes"_a = 0)
        .def_prop_ro("fd", &Arena::fd, "The file descriptor to hand to the other ranks.")
        .def_prop_ro("nbytes", &Arena::nbytes, "How large it may become.")
        .def_prop_ro("num_blocks", &Arena::num_blocks, "How many blocks are in use.")
        .def_prop_ro("allocated_nbytes", &Arena::allocated_nbytes, "How much memory is in use.")
        .def("empty", [](const std::shared_ptr<Arena>& self, std::size_t nbytes) {
            return new_shared_array(self, nbytes);
        }, "nbytes"_a, "Make a flat array of bytes in this arena.")
        .def("holds", [](const Arena& self, nb::handle buffer) {
            const View view = readable(buffer);
            return self.find(view.data(), view.nbytes()).has_value();
        }, "buffer"_a, "Tell whether memory lies in this arena.");
    nb::class_<World>(module, "World", "The processes of a host that share their arenas.")
        .def(nb::new_(&new_world), "rank"_a, "arena"_a, "fds"_a, "heartbeat"_a, "heartbeat_timeout"_a)
        .def("first_group", &first_group, nb::rv_policy::take_ownership, "Make the group of all.")
        .def("report", &World::report, "text"_a, "Show the others what this process waits in.")
        .def("report_of", [](const World& self, int rank) { return self.peer(rank).header().report.read(); },
             "rank"_a, "Read what a process waits in; empty if it does not.")
        .def("invitations_of", &World::invitations_of, "rank"_a,
             "List the groups, as world ranks, that a process waits to join.")
        .def("sweep", [](World& self) { self.sweep(); }, "Free what is left of groups that all have left.")
        .def_prop_ro("sent_nbytes", [](const World& self) { return self.sent_nbytes.load(); },
                     "Bytes this process has shown to others.")
        .def_prop_ro("received_nbytes", [](const World& self) { return self.received_nbytes.load(); },
                     "Bytes this process has read from others.");
}

void add_group(nb::module_& module) {
    nb::class_<SharedGroup> shared_group(module, "SharedGroup", "Ranks that do collectives in shared memory.");
    add_messages(shared_group);
    shared_group
        .def("run", &run_collective, "kind"_a, "dtype"_a, "op"_a, "root"_a, "source"_a.none(), "target"_a.none(),
             "count"_a, "counts"_a.none(), "in_place"_a, "sequence"_a, "fingerprint"_a, "deadline"_a,
             "in_background"_a, "poll"_a,
             "Do one whole collective; return its status.")
        .def_prop_ro("tickets", [](SharedGroup& self) -> Tickets& { return self.tickets; },
                     nb::rv_policy::reference_internal, "The order of its calls.")
        .def_prop_ro("call_path", [](nb::handle self) { return bind_call_path<SharedGroup>(self); },
                     "The fast path of a call: (backend, kind, x, out, op, root).")
        .def_prop_ro("start_path", [](nb::handle self) { return bind_start_path<SharedGroup>(self); },
                     "The same in flight: (backend, kind, x, out, op, root) -> its Work.")
        .def("stop_progress", [](SharedGroup& self) {
            const WithoutGil unlocked;
            self.progress.stop();
        }, "End the thread that runs calls in flight; it begins none any more.")
        .def("start_prepared", [](nb::handle self, nb::handle backend, int kind, nb::handle run, nb::handle finish) {
            SharedGroup& group = nb::cast<SharedGroup&>(self);
            return start_prepared(group.tickets, group.progress, self, backend, kind, run, finish);
        }, "backend"_a, "kind"_a, "run"_a, "finish"_a,
             "Put a call in flight whose collectives run(ticket, in_background) does.")
        .def_prop_ro("is_stopping", [](SharedGroup& self) { return self.progress.is_stopping(); },
                     "Whether calls in flight are to end.")
        .def_rw("is_open", &SharedGroup::is_open, "Whether calls may be made without asking Python.")
        .def_rw("reproducible", &SharedGroup::reproducible, "What calls are fingerprinted with.")
        .def_rw("fuse_nbytes", &SharedGroup::fuse_nbytes, "Up to which size arrays of a tree travel together.")
        .def_rw("timeout_ns", &SharedGroup::timeout_ns, "How long a call may wait; 0 is for ever.")
        .def("set_patience", [](SharedGroup& self, double timeout, double late_timeout) {
            self.patience = patience_of(timeout, late_timeout);
        }, "timeout"_a, "late_timeout"_a, "Set how long a call waits for ranks that are alive and not stuck.")
        .def("missing", &missing, "List the ranks that have not come to the current round.")
        .def("note_move", [](SharedGroup& self) { self.group->note_move(); },
             "Let the others see that the current call gets on.")
        .def("expire", [](SharedGroup& self, nb::handle deadline) {
            core::ProgressHook nobody;
            const Deadline limit(deadline);
            return CallStatus(self.group->expire({&nobody, limit.at_ns, core::no_spins, 0, 0, limit.patience}));
        }, "deadline"_a, "Bar ranks from the current call, which is late; done if it goes on all the same.")
        .def("last_call", &last_call, "rank"_a, "Return sequence and kind of a rank's last call.")
        .def("waited", &waited, "rank"_a, "for_rank"_a, "Return how long a rank has slept for another, in seconds.")
        .def("is_gone", [](const SharedGroup& self, int rank) { return self.group->is_gone(rank); }, "rank"_a,
             "Tell whether a rank has left or died.")
        .def("leave_reason_of", &leave_reason_of, "rank"_a, "Return how a rank left, None if it did not say.")
        .def("group_error", &group_error, "sequence"_a.none(), "Return the group error that concerns a call, or any.")
        .def("set_error", [](SharedGroup& self, std::uint64_t sequence, const nb::bytes& text) {
            const WithoutGil unlocked;
            return self.group->set_error(sequence, {text.c_str(), text.size()});
        }, "sequence"_a, "text"_a, "Set the group error; False if there is one.")
        .def("allocate_block", [](const SharedGroup& self, std::size_t nbytes) {
            return shm::CommonBlock::allocate(*self.group, nbytes);
        }, "nbytes"_a, "Take zeroed memory that all ranks are to index; return its offset.")
        .def("free_block", [](const SharedGroup& self, std::size_t offset) {
            self.group->world().arena().free(offset);
        }, "offset"_a, "Give back what nobody has opened.")
        .def("open_block", [](const SharedGroup& self, int owner, std::uint64_t offset, std::size_t nbytes) {
            return array_over_block(std::make_unique<shm::CommonBlock>(*self.group, owner, offset, nbytes), nbytes);
        }, "owner"_a, "offset"_a, "nbytes"_a, "Return memory that a rank has taken, as a flat array of bytes.")
        .def("announce_closing", [](SharedGroup& self) { self.group->announce_closing(); },
             "Say that no new calls come from this rank.")
        .def("leave", [](SharedGroup& self, const nb::bytes& leave_reason) {
            self.group->leave({leave_reason.c_str(), leave_reason.size()});
        }, "leave_reason"_a, "Say that nothing more comes from this rank, and how it left.")
        .def_prop_ro("has_left", [](const SharedGroup& self) { return self.group->has_left(); },
                     "Whether this rank has left.")
        .def_prop_ro("num_rounds", [](const SharedGroup& self) { return self.group->num_rounds(); },
                     "How often this rank has synchronised with the others.");
}

void add_split(nb::module_& module) {
    nb::class_<Split>(module, "Split", "Some ranks of a group on their way to be a group.")
        .def("__init__", [](Split* self, const SharedGroup& parent, std::vector<int> members, std::uint64_t identity) {
            new (self) Split(parent.group, std::move(members), identity);
        }, "parent"_a, "members"_a, "identity"_a)
        .def("wait", &wait_for_members, "deadline"_a, "poll"_a,
             "Wait for all members; return a status.")
        .def("absent", &Split::absent, "List the members that have not come.")
        .def("group", [](const Split& self) { return new SharedGroup(self.group()); },
             nb::rv_policy::take_ownership, "Return the group, when all members have come.");
}

}  // namespace

void add_shm(nb::module_& module) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const shm::OutOfMemory& error) {
            PyErr_SetString(PyExc_MemoryError, error.what());
        } catch (const std::system_error& error) {
            PyErr_SetString(PyExc_OSError, error.what());
        }
    });
    add_tickets(module);
    add_requests(module);
    add_world(module);
    add_group(module);
    add_split(module);
}

}  // namespace ferrodist::bind
