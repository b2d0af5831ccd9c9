// SPDX-License-Identifier: MIT OR Apache-2.0
// Point-to-point messages over TCP for Python.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bind/net_arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using net::Ending;
using Unlocked = nb::gil_scoped_release;

// A large message on its way; holds on to the sender's memory.
struct TcpLetter {
    TcpLetter(View view, std::shared_ptr<net::Letter> open, std::shared_ptr<net::Group> its_group)
        : payload(std::move(view)), letter(std::move(open)), group(std::move(its_group)) {}
    ~TcpLetter() { group->letters().abandon(*letter); }  // nobody may send from this memory any more
    TcpLetter(const TcpLetter&) = delete;
    TcpLetter& operator=(const TcpLetter&) = delete;

    View payload;
    std::shared_ptr<net::Letter> letter;
    std::shared_ptr<net::Group> group;
};

nb::object post(TcpGroup& self, int peer, std::uint32_t tag, const nb::bytes& header, nb::handle payload) {
    require_peer(self, peer);
    View view = readable(payload);
    std::shared_ptr<net::Letter> letter;
    {
        Unlocked unlocked;
        letter = self.group->letters().post(peer, tag, bytes_of(header), bytes_of(view));
    }
    return letter == nullptr ? nb::none() : nb::cast(new TcpLetter(std::move(view), std::move(letter), self.group),
                                                     nb::rv_policy::take_ownership);
}

Answer settle(TcpGroup& self, TcpLetter& held, double deadline, bool holds_caller, bool in_background,
              nb::handle look) {
    GilWatch watch(look.ptr(), nullptr, in_background);
    const shm::Patience patience = patience_of(self, watch, deadline, in_background);
    watch.let_go();
    const Ending ending = self.group->letters().settle(*held.letter, holds_caller, patience);
    watch.take_back();
    return answer(ending, watch);
}

std::tuple<int, int, nb::object, nb::bytes> receive(TcpGroup& self, int peer, std::uint32_t tag,
                                                    const nb::bytes& header, nb::handle target, double deadline,
                                                    bool in_background, nb::handle look,
                                                    [[maybe_unused]] TcpLetter* meanwhile) {
    require_peer(self, peer);
    const View view = writable(target);
    std::vector<std::byte> found;
    GilWatch watch(look.ptr(), nullptr, in_background);
    const shm::Patience patience = patience_of(self, watch, deadline, in_background);
    watch.let_go();
    const Ending ending =
        self.group->letters().receive(peer, tag, bytes_of(header), static_cast<std::byte*>(view.data()),
                                      view.nbytes(), patience, found);
    watch.take_back();
    const auto [outcome, culprit, error] = answer(ending, watch);
    return {outcome, culprit, error, nb::bytes(reinterpret_cast<const char*>(found.data()), found.size())};
}

}  // namespace

void add_tcp_letters(nb::module_& module, nb::class_<TcpGroup>& group) {
    nb::class_<TcpLetter>(module, "TcpLetter", "A large message on its way.");
    group
        .def("post", &post, "peer"_a, "tag"_a, "header"_a, "payload"_a,
             "Send a message; return the letter of a large one, which has to be settled.")
        .def("settle", &settle, "letter"_a, "deadline"_a, "holds_caller"_a, "in_background"_a, "look"_a,
             "Wait until the memory of a letter may change.")
        .def("take_back", [](TcpGroup& self, TcpLetter& held) {
            Unlocked unlocked;
            return self.group->letters().take_back(*held.letter);
        }, "letter"_a, "Withdraw a letter; False if the receiver has accepted it.")
        .def("abandon", [](TcpGroup& self, TcpLetter& held) {
            Unlocked unlocked;
            self.group->letters().abandon(*held.letter);
        }, "letter"_a, "End a letter, whatever has become of it.")
        .def("receive", &receive, "peer"_a, "tag"_a, "header"_a, "target"_a, "deadline"_a, "in_background"_a,
             "look"_a, "meanwhile"_a.none(),
             "Receive a message; also return the header of one that was not expected.")
        .def("waiting_tags", [](TcpGroup& self, int peer) {
            require_rank(self, peer);
            Unlocked unlocked;
            return self.group->letters().waiting_tags(peer);
        }, "peer"_a, "List the tags of messages that have come and nobody received.")
        .def("line_up", [](TcpGroup& self, int change) {
            Unlocked unlocked;
            self.group->line_up(change);
        }, "change"_a, "Count receives that wait for their turn, or have it.")
        .def("find_ring", [](TcpGroup& self, int peer) {
            require_peer(self, peer);
            Unlocked unlocked;
            return self.group->find_ring(peer);
        }, "peer"_a, "Return the ring of sends that a send is part of, or nothing.");
}

}  // namespace ferrodist::bind
