// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/letters.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bind/answer.hpp"
#include "bind/buffers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

// A large message on its way; holds on to the sender's memory.
struct HeldLetter {
    HeldLetter(View view, const shm::Letter& open) : payload(std::move(view)), letter(open) {}

    View payload;
    shm::Letter letter;
};

shm::ByteView view_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

const std::byte* data_of(const View& view) { return static_cast<const std::byte*>(view.data()); }

void require_peer(const SharedGroup& self, int peer) {
    if (peer < 0 || peer >= self.group->size() || peer == self.group->rank()) {
        throw nb::value_error("no such peer");
    }
}

nb::object post(SharedGroup& self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload) {
    require_peer(self, peer);
    View view = readable(payload);
    const shm::Letter letter = self.messages.post(peer, tag, view_of(header), data_of(view), view.nbytes());
    return letter.is_settled() ? nb::none() : nb::cast(new HeldLetter(std::move(view), letter),
                                                       nb::rv_policy::take_ownership);
}

shm::Patience patience_of(const SharedGroup& self, GilWatch& watch, double deadline, bool in_background) {
    return {&watch, deadline_ns(deadline), in_background ? shm::no_spins : self.group->spins()};
}

Answer settle(SharedGroup& self, HeldLetter& held, double deadline, bool holds_caller, bool in_background,
              nb::handle look) {
    held.letter.holds_caller = holds_caller;
    // Relaxed: a ring found in an earlier send is of no interest; nobody is ordered by it.
    self.group->words(self.group->rank()).ring_next.store(0, std::memory_order_relaxed);
    GilWatch watch(look.ptr(), nullptr, in_background);
    const shm::Patience patience = patience_of(self, watch, deadline, in_background);
    watch.let_go();
    const shm::Ending ending = self.messages.settle(held.letter, patience);
    watch.take_back();
    return answer(ending, watch);
}

std::tuple<int, int, nb::object, nb::bytes> receive(SharedGroup& self, int peer, std::uint32_t tag,
                                                    const nb::bytes& header, nb::handle target, double deadline,
                                                    bool in_background, nb::handle look, HeldLetter* meanwhile) {
    require_peer(self, peer);
    const View view = writable(target);
    std::vector<std::byte> found;
    GilWatch watch(look.ptr(), nullptr, in_background);
    const shm::Patience patience = patience_of(self, watch, deadline, in_background);
    watch.let_go();
    const shm::Ending ending =
        self.messages.receive(peer, tag, view_of(header), static_cast<std::byte*>(view.data()), view.nbytes(),
                              patience, found, meanwhile == nullptr ? nullptr : &meanwhile->letter);
    watch.take_back();
    const auto [outcome, culprit, error] = answer(ending, watch);
    return {outcome, culprit, error, nb::bytes(reinterpret_cast<const char*>(found.data()), found.size())};
}

void line_up(SharedGroup& self, int change) {
    self.num_in_line += change;
    // Relaxed: senders look at it now and then. Pairs with Messages::takes_no_more.
    self.group->words(self.group->rank()).num_receives.fetch_add(static_cast<std::uint32_t>(change),
                                                                 std::memory_order_relaxed);
}

// Follows words that name the next rank + 1, back to the first rank; empty if they do not lead there.
template <class Next>
std::vector<int> follow(int first, int world, Next next) {
    std::vector<int> ring{first};
    for (int rank = next(first); rank != first; rank = next(rank)) {
        if (rank < 0 || rank >= world || std::find(ring.begin(), ring.end(), rank) != ring.end()) {
            return {};
        }
        ring.push_back(rank);
    }
    return ring;
}

// The ring of large sends that this rank's send to `peer` is part of, from its lowest rank on.
std::vector<int> find_ring(SharedGroup& self, int peer) {
    const shm::Group& group = *self.group;
    const int me = group.rank();
    // Relaxed: all of them wait, so that nothing moves. Pairs with Messages::settle.
    std::vector<int> ring = follow(me, group.size(), [&](int rank) {
        return rank == me ? peer : static_cast<int>(group.words(rank).sending_to.load(std::memory_order_relaxed)) - 1;
    });
    for (std::size_t i = 0; i < ring.size(); ++i) {  // for the others: their chain ends here soon
        const auto next = static_cast<std::uint32_t>(ring[(i + 1) % ring.size()]) + 1;
        group.words(ring[i]).ring_next.store(next, std::memory_order_relaxed);  // pairs with the load below
    }
    if (ring.empty()) {
        // Relaxed: pairs with the store above, by another rank.
        ring = follow(me, group.size(), [&](int rank) {
            return static_cast<int>(group.words(rank).ring_next.load(std::memory_order_relaxed)) - 1;
        });
    }
    std::rotate(ring.begin(), std::min_element(ring.begin(), ring.end()), ring.end());
    return ring;
}

}  // namespace

void add_letters(nb::module_& module, nb::class_<SharedGroup>& shared_group) {
    nb::class_<HeldLetter>(module, "Letter", "A large message on its way.");
    shared_group
        .def("post", &post, "peer"_a, "tag"_a, "header"_a, "payload"_a,
             "Send a message; return the letter of a large one, which has to be settled.")
        .def("settle", &settle, "letter"_a, "deadline"_a, "holds_caller"_a, "in_background"_a, "look"_a,
             "Wait until the memory of a letter may change.")
        .def("take_back", [](SharedGroup& self, HeldLetter& held) { return self.messages.take_back(held.letter); },
             "letter"_a, "Withdraw a letter; False if the receiver has it, or is taking it.")
        .def("abandon", [](SharedGroup& self, HeldLetter& held) { self.messages.abandon(held.letter); }, "letter"_a,
             "End a letter, whatever has become of it.")
        .def("receive", &receive, "peer"_a, "tag"_a, "header"_a, "target"_a, "deadline"_a, "in_background"_a,
             "look"_a, "meanwhile"_a.none(),
             "Receive a message; also return the header of one that was not expected.")
        .def("waiting_tags", [](SharedGroup& self, int peer) {
            nb::gil_scoped_release unlocked;  // who reads the queue may need the GIL to go on
            return self.messages.waiting_tags(peer);
        }, "peer"_a,
             "List the tags of messages that have come and nobody received.")
        .def("line_up", &line_up, "change"_a, "Count receives that wait for their turn, or have it.")
        .def("find_ring", &find_ring, "peer"_a, "Return the ring of sends that a send is part of, or nothing.");
}

}  // namespace ferrodist::bind
