// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/messages.hpp"

#include "copy.hpp"
#include "shm/silence.hpp"

namespace ferrodist::shm {
namespace {

// What a wait for one peer looks at, now and then; `is_lost` tells whether it is in vain.
template <class IsLost>
class Lookout {
public:
    Lookout(Group& group, int peer, const Patience& patience, IsLost is_lost)
        : group_(group), peer_(peer), patience_(patience), is_lost_(is_lost) {}

    void begin() {
        if (looked_ns_ == 0) {
            looked_ns_ = now_ns();
            patience_.begin();
        }
    }

    Ending glance() const {
        if (group_.has_verdict(0)) {
            return {Outcome::verdict};
        }
        return {is_lost_() ? Outcome::lost : Outcome::done, peer_};
    }

    Ending look() {
        const std::int64_t now = now_ns(), passed = now - looked_ns_;
        looked_ns_ = now;
        if (const Ending ending = glance(); ending.failed()) {
            return ending;
        }
        if (silence_.is_too_long(group_.peer(peer_), group_.world().silence_ns(), passed)) {
            return {Outcome::silent, peer_};
        }
        if (patience_.is_late()) {
            return {Outcome::late};
        }
        return {patience_.watch->look() ? Outcome::done : Outcome::interrupted};
    }

    // For what is busy and never sleeps.
    Ending look_if_due() {
        begin();
        return now_ns() - looked_ns_ >= longest_sleep_ns ? look() : Ending{};
    }

private:
    Group& group_;
    const int peer_;
    const Patience& patience_;
    IsLost is_lost_;
    Silence silence_;
    std::int64_t looked_ns_ = 0;
};

// Counts a receive that is in flight.
class InFlight {
public:
    explicit InFlight(Word& count) : count_(count) {
        count_.fetch_add(1, std::memory_order_seq_cst);  // pairs with the look in takes_no_more
    }
    // Pairs with the look in takes_no_more: whatever was claimed is seen to be.
    ~InFlight() { count_.fetch_sub(1, std::memory_order_release); }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

private:
    Word& count_;
};

// Shows whom a blocked send is for, so that rings of sends are found.
class ShownSend {
public:
    ShownSend(Word& sending_to, const Letter& letter)
        : sending_to_(letter.holds_caller ? &sending_to : nullptr) {
        show(static_cast<std::uint32_t>(letter.peer) + 1);
    }
    ~ShownSend() { show(0); }
    ShownSend(const ShownSend&) = delete;
    ShownSend& operator=(const ShownSend&) = delete;

private:
    void show(std::uint32_t value) {
        if (sending_to_ != nullptr) {
            // Relaxed: a hint for those who look for a reason. Pairs with nothing.
            sending_to_->store(value, std::memory_order_relaxed);
        }
    }

    Word* sending_to_;
};

// Has the receiver of a letter ring the bell that its sender is going to sleep on.
void answer_at(const Letter& letter, int peer) {
    // Pairs with the load in set_emptied: who does not see this was seen by the looks that follow.
    letter.courier->transfer->bell.store(static_cast<std::uint32_t>(peer), std::memory_order_seq_cst);
}

}  // namespace

Messages::Messages(Group& group) : group_(group) {
    for (int peer = 0; peer < group.size(); ++peer) {
        outboxes_.emplace_back(group, peer);
        inboxes_.emplace_back(group, peer);
    }
}

Messages::~Messages() {
    if (group_.world().is_of_ancestor()) {
        return;
    }
    for (Outbox& outbox : outboxes_) {
        outbox.close();
    }
}

// -- sending ---------------------------------------------------------------------------------------

Letter Messages::post(int peer, std::uint32_t tag, ByteView header, const std::byte* payload,
                      std::size_t nbytes) {
    Outbox& outbox = outboxes_[static_cast<std::size_t>(peer)];
    if (nbytes > largest_whole) {
        Letter letter = outbox.offer(tag, header, {payload, nbytes});
        letter.is_of_call = tag >= first_tag_of_calls;
        return letter;
    }
    outbox.send(tag, header, {payload, nbytes});
    group_.world().sent_nbytes.fetch_add(nbytes, std::memory_order_relaxed);  // a statistic
    return {};
}

Ending Messages::settle(Letter& letter, const Patience& patience) {
    if (letter.is_settled()) {
        return {};
    }
    Bell& bell = inboxes_[static_cast<std::size_t>(letter.peer)].bell();
    answer_at(letter, letter.peer);
    const ShownSend shown(group_.words(group_.rank()).sending_to, letter);
    const auto can_go_on = [&] { return is_through(letter) || can_fill(letter); };
    Lookout lookout(group_, letter.peer, patience, [&] { return takes_no_more(letter) && !can_go_on(); });
    while (!is_through(letter)) {
        const Ending ending = can_fill(letter) ? lookout.look_if_due()
                                               : wait_until(bell.rings, bell.sleepers, patience, can_go_on, lookout);
        if (ending.failed()) {
            return ending;
        }
        if (can_fill(letter)) {
            fill(letter, group_);
        }
    }
    group_.world().sent_nbytes.fetch_add(letter.nbytes, std::memory_order_relaxed);  // a statistic
    outboxes_[static_cast<std::size_t>(letter.peer)].end(letter);
    return {};
}

bool Messages::take_back(Letter& letter) {
    if (letter.is_settled() || !letter.courier->transfer->move(Transfer::offered, Transfer::withdrawn)) {
        return false;
    }
    outboxes_[static_cast<std::size_t>(letter.peer)].end(letter);
    return true;
}

void Messages::abandon(Letter& letter) {
    if (letter.is_settled()) {
        return;
    }
    give_up(*letter.courier->transfer);
    bell_at(group_, letter.peer).ring();
    outboxes_[static_cast<std::size_t>(letter.peer)].end(letter);
}

// Whether a letter that is not claimed will never be.
bool Messages::takes_no_more(const Letter& letter) const {
    const RankWords& theirs = group_.words(letter.peer);
    if (group_.is_gone(letter.peer) || letter.is_of_call) {
        return group_.is_gone(letter.peer);
    }
    // Pairs with Group::announce_closing, then with InFlight: what was claimed before is seen.
    return theirs.presence.load(std::memory_order_seq_cst) >= Presence::closing &&
           theirs.num_receives.load(std::memory_order_seq_cst) == 0 &&
           letter.courier->transfer->stage_now() == Transfer::offered;
}

// -- receiving -------------------------------------------------------------------------------------

// One call of receive.
class Messages::Receipt {
public:
    Receipt(Messages& messages, int peer, const Patience& patience, Wanted& wanted, Letter* meanwhile)
        : messages_(messages), group_(messages.group_), peer_(peer), patience_(patience), wanted_(wanted),
          meanwhile_(meanwhile), inbox_(messages.inboxes_[static_cast<std::size_t>(peer)]) {
        if (meanwhile != nullptr && !meanwhile->is_settled()) {
            answer_at(*meanwhile, peer);
        }
    }

    Ending go() {
        const Ending ending = find();
        return ending.failed() || wanted_.transfer == nullptr ? ending : collect();
    }

private:
    // Waits for the message. If it is a large one it is only claimed then.
    Ending find() {
        Inbox::Turn turn(inbox_);
        const auto is_ready = [&] { return inbox_.is_ready(turn, wanted_.tag); };
        // What came before the peer went still counts, and only who is in turn knows what came.
        Lookout lookout(group_, peer_, patience_,
                        [&] { return messages_.sends_no_more(peer_, wanted_.tag) && turn.has_begun() && !is_ready(); });
        while (true) {
            if (const auto ending = inbox_.fetch(turn, wanted_)) {
                return *ending;
            }
            if (const Ending ending = wait(is_ready, lookout); ending.failed()) {
                return ending;
            }
        }
    }

    Ending collect() {
        patience_.begin();
        Transfer& transfer = *wanted_.transfer;
        const bool is_streamed = transfer.is_streamed != 0;
        const std::byte* const source =
            group_.peer(peer_).at(transfer.place, is_streamed ? Transfer::ring_nbytes : wanted_.nbytes);
        Ending ending;
        if (source == nullptr) {
            ending = {Outcome::corrupt, peer_};
        } else if (is_streamed) {
            ending = empty_ring(source);
        } else {
            copy_bytes(wanted_.target, source, wanted_.nbytes);
        }
        const bool is_intact = end_transfer(transfer, group_, peer_);
        return ending.failed() || is_intact ? ending : Ending{Outcome::lost, peer_};
    }

    Ending empty_ring(const std::byte* ring) {
        Transfer& transfer = *wanted_.transfer;
        std::uint32_t index = 0;
        const auto is_ready = [&] {
            // Pairs with the store in fill: the piece was written before. Seq_cst for the bell.
            const std::uint32_t filled = transfer.filled.load(std::memory_order_seq_cst);
            return filled - index - 1 < Transfer::num_pieces || transfer.stage_now() == Transfer::broken;
        };
        Lookout lookout(group_, peer_, patience_, [&] { return group_.is_gone(peer_) && !is_ready(); });
        while (index < count_pieces(wanted_.nbytes)) {
            const Ending ending = is_ready() ? lookout.look_if_due() : wait(is_ready, lookout);
            if (ending.failed() || transfer.stage_now() == Transfer::broken) {
                return ending.failed() ? ending : Ending{Outcome::lost, peer_};
            }
            if (is_ready()) {
                const Piece piece(wanted_.nbytes, index);
                copy_bytes(wanted_.target + piece.start, ring + piece.place, piece.nbytes);
                set_emptied(transfer, ++index, group_, peer_);
            }
        }
        return {};
    }

    // Waits until something is ready, or moves the other letter along.
    template <class IsReady, class Lookout>
    Ending wait(IsReady is_ready, Lookout& lookout) {
        const auto can_go_on = [&] { return (meanwhile_ != nullptr && can_fill(*meanwhile_)) || is_ready(); };
        Bell& bell = inbox_.bell();
        Ending ending = wait_until(bell.rings, bell.sleepers, patience_, can_go_on, lookout);
        if (!ending.failed() && ++num_waits_ > 1) {
            ending = lookout.look_if_due();
        }
        if (!ending.failed() && meanwhile_ != nullptr && can_fill(*meanwhile_)) {
            fill(*meanwhile_, group_);
        }
        return ending;
    }

    Messages& messages_;
    Group& group_;
    const int peer_;
    const Patience& patience_;
    Wanted& wanted_;
    Letter* const meanwhile_;
    Inbox& inbox_;
    int num_waits_ = 0;
};

Ending Messages::receive(int peer, std::uint32_t tag, ByteView expected, std::byte* target, std::size_t nbytes,
                         const Patience& patience, std::vector<std::byte>& found, Letter* meanwhile) {
    const InFlight flight(group_.words(group_.rank()).num_receives);
    Wanted wanted{tag, expected, target, nbytes, found};
    const Ending ending = Receipt(*this, peer, patience, wanted, meanwhile).go();
    if (!ending.failed()) {
        group_.world().received_nbytes.fetch_add(nbytes, std::memory_order_relaxed);  // a statistic
    }
    return ending;
}

std::vector<std::uint32_t> Messages::waiting_tags(int peer) {
    return inboxes_[static_cast<std::size_t>(peer)].waiting_tags();
}

bool Messages::sends_no_more(int peer, std::uint32_t tag) const {
    // Pairs with Group::announce_closing: what was sent before is seen after this. Who closes still
    // finishes the calls it has in flight.
    const bool is_closing = group_.words(peer).presence.load(std::memory_order_acquire) >= Presence::closing;
    return (is_closing && tag < first_tag_of_calls) || group_.is_gone(peer);
}

}  // namespace ferrodist::shm
