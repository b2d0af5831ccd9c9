// SPDX-License-Identifier: MIT OR Apache-2.0
// Arenas, worlds, groups and splits for Python.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <vector>

#include "bind/arrays.hpp"
#include "bind/groups.hpp"
#include "bind/hooks.hpp"
#include "shm/collectives.hpp"
#include "shm/split.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using shm::Arena;
using shm::World;

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
    return new SharedGroup(std::make_shared<shm::Group>(world, members, world->rank(), block, own, nullptr));
}

// -- calls -----------------------------------------------------------------------------------------

// The lengths of blocks in bytes, from counts of elements.
std::vector<std::uint64_t> block_nbytes(nb::handle counts, std::size_t itemsize) {
    std::vector<std::uint64_t> blocks;
    for (PyObject* count : Items(counts)) {
        blocks.push_back(nb::cast<std::uint64_t>(nb::handle(count)) * itemsize);
    }
    return blocks;
}

CallStatus run_collective(SharedGroup& self, std::uint32_t kind, std::size_t dtype, std::size_t op, int root,
                          nb::handle source, nb::handle target, std::size_t count, nb::handle counts, bool in_place,
                          std::uint64_t sequence, std::uint64_t fingerprint, nb::handle deadline, bool in_background,
                          nb::handle poll) {
    require(kind < shm::num_kinds, "unknown kind");
    require(dtype < num_dtypes, "unknown dtype");
    require(op < num_ops && can_reduce(static_cast<DType>(dtype), static_cast<Op>(op)),
            "this op makes no sense for this dtype");
    require(root >= 0 && root < self.size, "no such root");
    const View input = readable_if(source), output = writable_if(target);
    const std::size_t item = item_size(static_cast<DType>(dtype));
    const std::vector<std::uint64_t> blocks = counts.is_none() ? std::vector<std::uint64_t>{} : block_nbytes(counts, item);
    const shm::Task task{static_cast<shm::Kind>(kind),
                         static_cast<DType>(dtype),
                         static_cast<Op>(op),
                         root,
                         input.data(),
                         output.data(),
                         count * item,
                         counts.is_none() ? nullptr : blocks.data(),
                         in_place,
                         fingerprint};
    return wait_without_gil({deadline, in_background, poll}, self.spins, sequence,
                            [&](const core::WaitOptions& options) { return shm::run(*self.group, task, options); });
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
        .def("is_dead", &World::is_dead, "rank"_a, "Tell whether a process is gone.")
        .def("beats_of", [](const World& self, int rank) {
            return self.peer(rank).header().beat.count.load(std::memory_order_relaxed);  // pairs with the heartbeat
        }, "rank"_a, "Count the heartbeats of a process.")
        .def("sweep", [](World& self) { self.sweep(); }, "Free what is left of groups that all have left.")
        .def_prop_ro("sent_nbytes", [](const World& self) { return self.sent_nbytes.load(); },
                     "Bytes this process has shown to others.")
        .def_prop_ro("received_nbytes", [](const World& self) { return self.received_nbytes.load(); },
                     "Bytes this process has read from others.");
}

void add_group(nb::module_& module) {
    nb::class_<SharedGroup, MessageGroup>(module, "SharedGroup", "Ranks that do collectives in shared memory.")
        .def("run", &run_collective, "kind"_a, "dtype"_a, "op"_a, "root"_a, "source"_a.none(), "target"_a.none(),
             "count"_a, "counts"_a.none(), "in_place"_a, "sequence"_a, "fingerprint"_a, "deadline"_a,
             "in_background"_a, "poll"_a,
             "Do one whole collective; return its status.")
        .def("fence", [](SharedGroup& self, int rank) {
            require_rank(self, rank);
            return self.group->fence(rank);
        }, "rank"_a, "Keep a rank out of what this one has shown; tell whether it may be using that already.")
        .def("take_back_shown", [](SharedGroup& self) { self.group->take_back_shown(); },
             nb::call_guard<nb::gil_scoped_release>(),
             "Let what was shown in a call that failed be memory of this process alone.")
        .def("note_move", [](SharedGroup& self) { self.group->note_move(); },
             "Let the others see that the current call gets on.")
        .def("allocate_block", [](const SharedGroup& self, std::size_t nbytes) {
            return shm::CommonBlock::allocate(*self.group, nbytes);
        }, "nbytes"_a, "Take zeroed memory that all ranks are to index; return its offset.")
        .def("free_block", [](const SharedGroup& self, std::size_t offset) {
            self.group->world().arena().free(offset);
        }, "offset"_a, "Give back what nobody has opened.")
        .def("open_block", [](const SharedGroup& self, int owner, std::uint64_t offset, std::size_t nbytes) {
            return array_over_block(std::make_unique<shm::CommonBlock>(*self.group, owner, offset, nbytes), nbytes);
        }, "owner"_a, "offset"_a, "nbytes"_a, "Return memory that a rank has taken, as a flat array of bytes.")
        .def_prop_ro("num_rounds", [](const SharedGroup& self) { return self.group->num_rounds(); },
                     "How often this rank has synchronised with the others.");
}

}  // namespace

void add_shm(nb::module_& module) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const shm::OutOfMemory& error) {
            set_memory_error(error);
        } catch (const std::system_error& error) {
            PyErr_SetString(PyExc_OSError, error.what());
        }
    });
    add_world(module);
    add_group(module);
    add_split<SharedGroup, shm::Split>(module, "Split");
}

}  // namespace ferrodist::bind
