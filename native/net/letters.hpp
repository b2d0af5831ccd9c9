// SPDX-License-Identifier: MIT OR Apache-2.0
// Letters: point-to-point messages between the ranks of a group.
//
// Small ones travel whole and are kept by their receiver until somebody wants them. Large ones are
// offered; they travel when their receiver has accepted, straight into its memory, and may be
// withdrawn until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "net/mesh.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {

class Group;

// A large message that is to be sent.
struct Letter {
    int peer = -1;
    std::uint64_t number = 0;
    Bytes content;
    Ticket ticket;
    bool is_accepted = false, is_done = false;
};

class Letters {
public:
    static constexpr std::size_t largest_whole = 64 * 1024;

    explicit Letters(Group& group) : group_(group) {}

    // Sends up to 64 KB at once and gives null. Larger ones are offered: `content` must not change
    // before the letter is settled, taken back or abandoned.
    std::shared_ptr<Letter> post(int peer, std::uint32_t tag, Bytes header, Bytes content);
    // Waits until the memory of a letter may change.
    Ending settle(Letter& letter, bool holds_caller, const Patience& patience);
    // Withdraws a letter; false if its receiver has accepted it.
    bool take_back(Letter& letter);
    // Ends a letter, whatever has become of it.
    void abandon(Letter& letter);
    // Receives the oldest message of a rank with this tag; one of another header or size is dropped,
    // its header goes to `found`, and the outcome is `unexpected`.
    Ending receive(int peer, std::uint32_t tag, Bytes header, std::byte* target, std::size_t size,
                   const Patience& patience, std::vector<std::byte>& found);
    std::vector<std::uint32_t> waiting_tags(int peer);

    // -- frames: with the lock held -------------------------------------------------------------

    std::byte* place_for(int peer, const Header& header);
    void on_frame(int peer, const Header& header, Payload payload);

private:
    // A message that has come, or is offered.
    struct Incoming {
        bool is_offer;
        std::uint64_t number, size;
        Payload payload;              // of a small one
        std::size_t content_begins;   // in the payload
        Bytes header() const {
            return is_offer ? payload.bytes() : payload.bytes().subspan(2, content_begins - 2);
        }
    };
    // A large message on its way to its place.
    struct Arrival {
        std::byte* target;
        std::size_t size, filled = 0;
        bool is_abandoned = false;
    };
    using Key = std::pair<int, std::uint32_t>;  // rank, tag

    Ending fetch(int peer, std::uint64_t number, std::byte* target, std::size_t size, Waiter& waiter,
                 bool& is_abandoned);
    Ending trouble(int peer, bool is_gone) const;

    Group& group_;
    std::map<Key, std::deque<Incoming>> incoming_;
    std::map<std::pair<int, std::uint64_t>, Arrival> arrivals_;
    std::map<std::uint64_t, Letter*> open_;
};

}  // namespace ferrodist::net
