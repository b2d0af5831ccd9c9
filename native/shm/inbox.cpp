// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/inbox.hpp"

#include <algorithm>
#include <cstring>

#include "copy.hpp"

namespace ferrodist::shm {

void Inbox::Turn::end() {
    if (lock_.owns_lock()) {
        lock_.unlock();
        inbox_.bell().ring();  // another thread may want to be next
    }
}

Bell& Inbox::bell() const {
    return group_.layout().bell(static_cast<std::size_t>(group_.rank()), static_cast<std::size_t>(peer_));
}

// Looks at what was set aside after the turn has begun: from then on nobody else adds to it, so
// nothing that is older than what the queue holds can be overlooked.
std::optional<Ending> Inbox::fetch(Turn& turn, Wanted& wanted) {
    turn.try_begin();
    while (const auto parcel = take_aside(wanted.tag)) {
        if (const auto ending = accept(parcel->message(), wanted)) {
            return ending;
        }
    }
    return turn.has_begun() ? read(wanted) : std::nullopt;
}

bool Inbox::is_ready(Turn& turn, std::uint32_t tag) {
    if (!turn.has_begun()) {
        return has_aside(tag) || turn.try_begin();
    }
    const QueueReader* const open = reader();
    return open != nullptr && open->has_news();
}

// The queue, as soon as the peer has one. In turn.
QueueReader* Inbox::reader() {
    if (!reader_) {
        const Offset& shown = group_.layout().queue(static_cast<std::size_t>(peer_),
                                                    static_cast<std::size_t>(group_.rank()));
        // Pairs with the store in Outbox::append; seq_cst for the bell that is slept on.
        const std::uint64_t offset = shown.load(std::memory_order_seq_cst);
        if (offset == 0) {
            return nullptr;
        }
        reader_.emplace(group_.peer(peer_), offset);
    }
    return &*reader_;
}

// Reads the queue until the tag is found. In turn.
std::optional<Ending> Inbox::read(Wanted& wanted) {
    QueueReader* const open = reader();
    if (open == nullptr) {
        return std::nullopt;
    }
    while (true) {
        Message message;
        switch (open->front(message)) {
            case QueueReader::Look::nothing: return std::nullopt;
            case QueueReader::Look::corrupt: return Ending{Outcome::corrupt, peer_};
            case QueueReader::Look::message: break;
        }
        std::optional<Ending> ending;
        if (message.tag == wanted.tag) {
            ending = accept(message, wanted);
        } else {
            set_aside(message);
        }
        open->pop();
        if (ending) {
            return ending;
        }
    }
}

// -- one message -----------------------------------------------------------------------------------

// None if the message was taken back.
std::optional<Ending> Inbox::accept(const Message& message, Wanted& wanted) {
    if (message.kind == Record::offer) {
        return accept_offer(message, wanted);
    }
    if (message.body.size() != wanted.nbytes || !std::ranges::equal(message.header, wanted.header)) {
        wanted.found.assign(message.header.begin(), message.header.end());
        return Ending{Outcome::unexpected, peer_};
    }
    copy_bytes(wanted.target, message.body.data(), wanted.nbytes);
    return Ending{};
}

std::optional<Ending> Inbox::accept_offer(const Message& message, Wanted& wanted) {
    Transfer* const transfer = find_transfer(message);
    if (transfer == nullptr) {
        return Ending{Outcome::corrupt, peer_};
    }
    if (!transfer->move(Transfer::offered, Transfer::claimed)) {
        end_transfer(*transfer, group_, peer_);
        return std::nullopt;
    }
    if (transfer->nbytes != wanted.nbytes || !std::ranges::equal(message.header, wanted.header)) {
        end_transfer(*transfer, group_, peer_);
        wanted.found.assign(message.header.begin(), message.header.end());
        return Ending{Outcome::unexpected, peer_};
    }
    wanted.transfer = transfer;
    return Ending{};
}

Transfer* Inbox::find_transfer(const Message& message) const {
    std::uint64_t offset = 0;
    if (message.kind != Record::offer || message.body.size() != sizeof(offset)) {
        return nullptr;
    }
    std::memcpy(&offset, message.body.data(), sizeof(offset));
    return offset % alignof(Transfer) != 0
               ? nullptr
               : reinterpret_cast<Transfer*>(group_.peer(peer_).at(offset, sizeof(Transfer)));
}

void set_emptied(Transfer& transfer, std::uint32_t emptied, Group& group, int peer) {
    // Pairs with can_fill and is_over on the sender's side; seq_cst for the bell.
    transfer.emptied.store(emptied, std::memory_order_seq_cst);
    // Pairs with the stores in Messages: who changes it looks at `emptied` after that.
    const std::size_t bell = transfer.bell.load(std::memory_order_seq_cst);
    if (bell < static_cast<std::size_t>(group.size())) {
        group.layout().bell(static_cast<std::size_t>(peer), bell).ring();
    }
}

bool end_transfer(Transfer& transfer, Group& group, int peer) {
    const bool is_intact = transfer.move(Transfer::claimed, Transfer::ended);
    set_emptied(transfer, Transfer::over, group, peer);
    return is_intact;
}

// -- what is set aside -----------------------------------------------------------------------------

Inbox::Parcel::Parcel(const Message& message)
    : kind(message.kind), tag(message.tag), body_nbytes(message.body.size()),
      bytes(message.body.size() + message.header.size()) {
    copy_bytes(bytes.data(), message.body.data(), body_nbytes);
    copy_bytes(bytes.data() + body_nbytes, message.header.data(), message.header.size());
}

Message Inbox::Parcel::message() const {
    const ByteView all(bytes);
    return {kind, tag, all.subspan(body_nbytes), all.first(body_nbytes)};
}

void Inbox::set_aside(const Message& message) {
    Parcel parcel(message);
    {
        const std::lock_guard lock(mutex_);
        aside_[message.tag].push_back(std::move(parcel));
        // Pairs with the loads in has_aside and take_aside; seq_cst for the bell.
        num_aside_.fetch_add(1, std::memory_order_seq_cst);
    }
    bell().ring();  // another thread may wait for it
}

bool Inbox::has_aside(std::uint32_t tag) {
    if (num_aside_.load(std::memory_order_seq_cst) == 0) {  // pairs with set_aside
        return false;
    }
    const std::lock_guard lock(mutex_);
    return aside_.contains(tag);
}

std::optional<Inbox::Parcel> Inbox::take_aside(std::uint32_t tag) {
    if (num_aside_.load(std::memory_order_seq_cst) == 0) {  // pairs with set_aside
        return std::nullopt;
    }
    const std::lock_guard lock(mutex_);
    const auto found = aside_.find(tag);
    if (found == aside_.end()) {
        return std::nullopt;
    }
    std::optional<Parcel> parcel(std::move(found->second.front()));
    found->second.pop_front();
    if (found->second.empty()) {
        aside_.erase(found);
    }
    num_aside_.fetch_sub(1, std::memory_order_relaxed);  // a look too many costs nothing
    return parcel;
}

// Sets everything aside. In turn.
void Inbox::read_all() {
    QueueReader* const open = reader();
    Message message;
    while (open != nullptr && open->front(message) == QueueReader::Look::message) {
        set_aside(message);
        open->pop();
    }
}

std::vector<std::uint32_t> Inbox::waiting_tags() {
    if (Turn turn(*this); turn.try_begin()) {
        read_all();
    }
    std::vector<std::uint32_t> tags;
    const std::lock_guard lock(mutex_);
    for (const auto& [tag, parcels] : aside_) {
        for (const Parcel& parcel : parcels) {
            const Transfer* const transfer = find_transfer(parcel.message());
            if (transfer == nullptr || transfer->stage_now() == Transfer::offered) {
                tags.push_back(tag);
            }
        }
    }
    return tags;
}

}  // namespace ferrodist::shm
