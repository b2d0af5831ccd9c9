// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages: point to point between the ranks of a group.
//
// Messages from one rank to another with one tag are received in the order they were sent. Small
// ones are copied into a queue and never wait. Large ones are only announced there: a letter, which
// the receiver claims, and which its sender may take back until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "shm/group.hpp"
#include "shm/inbox.hpp"
#include "shm/outbox.hpp"

namespace ferrodist::shm {

// One per process and group; ends before the group does. Any number of threads may use it.
class Messages {
public:
    static constexpr std::size_t largest_whole = 64 * 1024;
    // From here on tags are not users': such messages are part of a call of the whole group.
    static constexpr std::uint32_t first_tag_of_calls = std::uint32_t{1} << 31;

    explicit Messages(Group& group);
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    // Sends up to 64 KB without waiting for the receiver, whatever is unreceived so far. Larger ones
    // are offered: the letter has to be settled before `payload` may change. Throws OutOfMemory.
    Letter post(int peer, std::uint32_t tag, ByteView header, const std::byte* payload, std::size_t nbytes);

    // Waits until the payload may change. If that fails the letter is still open: settle it again,
    // take it back, or abandon it.
    Ending settle(Letter& letter, const Patience& patience);
    // Withdraws a letter; false if the receiver has it, or is taking it.
    bool take_back(Letter& letter);
    // Ends a letter whatever has become of it. A receiver in the middle of it finds its sender lost.
    void abandon(Letter& letter);

    // Receives the oldest message of `peer` with this tag. If its header differs from `expected` or
    // its size from `nbytes`, it is consumed and dropped, `found` gets its header, and the outcome is
    // `unexpected`. A large message whose fetching fails in the middle is gone. While it waits, it
    // moves the letter `meanwhile` along: who sends and receives at once must not be in two waits.
    Ending receive(int peer, std::uint32_t tag, ByteView expected, std::byte* target, std::size_t nbytes,
                   const Patience& patience, std::vector<std::byte>& found, Letter* meanwhile = nullptr);

    // The tags of messages that have come and nobody received.
    std::vector<std::uint32_t> waiting_tags(int peer);

private:
    class Receipt;

    bool sends_no_more(int peer, std::uint32_t tag) const;
    bool takes_no_more(const Letter& letter) const;

    Group& group_;
    std::deque<Outbox> outboxes_;  // by peer
    std::deque<Inbox> inboxes_;
};

}  // namespace ferrodist::shm
