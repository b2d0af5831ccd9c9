// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/letters.hpp"

#include <algorithm>
#include <cstring>

#include "net/group.hpp"

namespace ferrodist::net {

// -- sending --------------------------------------------------------------------------------------

std::shared_ptr<Letter> Letters::post(int peer, std::uint32_t tag, Bytes header, Bytes content) {
    const Lock guard = group_.mesh().lock();
    if (content.size() <= largest_whole) {
        std::vector<std::byte> whole(2 + header.size() + content.size());
        const auto length = static_cast<std::uint16_t>(header.size());
        std::memcpy(whole.data(), &length, 2);
        std::copy(header.begin(), header.end(), whole.begin() + 2);
        std::copy(content.begin(), content.end(), whole.begin() + 2 + static_cast<std::ptrdiff_t>(header.size()));
        group_.send(peer, {.kind = FrameKind::letter, .tag = tag}, whole);
        return nullptr;
    }
    auto letter = std::make_shared<Letter>();
    letter->peer = peer;
    letter->number = group_.mesh().new_number();
    letter->content = content;
    open_[letter->number] = letter.get();
    group_.send(peer, {.kind = FrameKind::offer, .tag = tag, .sequence = letter->number,
                       .fingerprint = content.size()}, header);
    return letter;
}

Ending Letters::settle(Letter& letter, bool holds_caller, const Patience& patience) {
    Mesh& mesh = group_.mesh();
    Lock guard = mesh.lock();
    Waiter waiter(mesh, guard, patience);
    if (holds_caller) {
        group_.begin_send(letter.peer);
    }
    Ending ending;
    while (!letter.is_done && !(letter.is_accepted && letter.ticket.pending == 0)) {
        ending = trouble(letter.peer, group_.takes_no_more(letter.peer) && !letter.is_accepted);
        if (ending.failed() || (ending = waiter.until_change(mesh.tick())).failed()) {
            break;
        }
    }
    if (!ending.failed()) {  // else it shows whom it was for until it is withdrawn: others may ask
        group_.set_sending_to(-1);
        open_.erase(letter.number);
    }
    return ending;
}

bool Letters::take_back(Letter& letter) {
    const Lock guard = group_.mesh().lock();
    group_.set_sending_to(-1);
    if (letter.is_done) {
        open_.erase(letter.number);
        return true;
    }
    if (letter.is_accepted) {
        return false;
    }
    open_.erase(letter.number);
    letter.is_done = true;
    group_.send(letter.peer, {.kind = FrameKind::withdraw, .sequence = letter.number});
    return true;
}

void Letters::abandon(Letter& letter) {
    if (group_.mesh().is_of_ancestor()) {
        return;
    }
    const Lock guard = group_.mesh().lock();
    if (open_.erase(letter.number) == 0) {
        return;
    }
    group_.set_sending_to(-1);
    if (letter.ticket.pending > 0) {
        group_.mesh().link(group_.world_rank(letter.peer)).detach(letter.ticket);
        group_.send(letter.peer, {.kind = FrameKind::abandoned, .sequence = letter.number});
    } else if (!letter.is_accepted && !letter.is_done) {
        group_.send(letter.peer, {.kind = FrameKind::withdraw, .sequence = letter.number});
    }
    letter.is_done = true;
}

// -- receiving ------------------------------------------------------------------------------------

Ending Letters::trouble(int peer, bool is_gone) const {
    if (group_.find_verdict(0) != nullptr) {
        return {Outcome::verdict};
    }
    if (is_gone) {
        return group_.loss(peer);
    }
    const int world_rank = group_.world_rank(peer);
    return group_.mesh().is_silent(world_rank) ? Ending{Outcome::silent, peer} : Ending{};
}

Ending Letters::receive(int peer, std::uint32_t tag, Bytes header, std::byte* target, std::size_t size,
                        const Patience& patience, std::vector<std::byte>& found) {
    Mesh& mesh = group_.mesh();
    Lock guard = mesh.lock();
    Waiter waiter(mesh, guard, patience);
    while (true) {
        const auto waiting = incoming_.find({peer, tag});
        if (waiting == incoming_.end()) {
            Ending ending = trouble(peer, group_.sends_no_more(peer));
            if (ending.failed() || (ending = waiter.until_change(mesh.tick())).failed()) {
                return ending;
            }
            continue;
        }
        const Incoming message = std::move(waiting->second.front());
        waiting->second.pop_front();
        if (waiting->second.empty()) {
            incoming_.erase(waiting);
        }
        const Bytes its_header = message.header();
        if (message.size != size || !std::equal(its_header.begin(), its_header.end(), header.begin(), header.end())) {
            found.assign(its_header.begin(), its_header.end());
            if (message.is_offer) {
                group_.send(peer, {.kind = FrameKind::taken, .sequence = message.number});
            }
            return {Outcome::unexpected, peer};
        }
        if (!message.is_offer) {
            if (size > 0) {
                std::memcpy(target, message.payload.memory.get() + message.content_begins, size);
            }
            return {};
        }
        bool is_abandoned = false;
        const Ending ending = fetch(peer, message.number, target, size, waiter, is_abandoned);
        if (!is_abandoned) {
            return ending;
        }
    }
}

// Has a large message sent and waits for all of it.
Ending Letters::fetch(int peer, std::uint64_t number, std::byte* target, std::size_t size, Waiter& waiter,
                      bool& is_abandoned) {
    Mesh& mesh = group_.mesh();
    const auto [arrival, is_new] = arrivals_.emplace(std::pair(peer, number), Arrival{target, size});
    if (!is_new) {
        return {Outcome::corrupt, peer};  // two messages cannot have one number
    }
    group_.send(peer, {.kind = FrameKind::accept, .sequence = number});
    Ending ending;
    while (arrival->second.filled < size && !arrival->second.is_abandoned) {
        ending = trouble(peer, group_.is_gone(peer));
        if (ending.failed() || (ending = waiter.until_change(mesh.tick())).failed()) {
            break;
        }
    }
    if (arrival->second.filled < size) {
        mesh.link(group_.world_rank(peer)).give_up_place(target, size);
    }
    is_abandoned = arrival->second.is_abandoned;
    arrivals_.erase(arrival);
    return ending;
}

std::vector<std::uint32_t> Letters::waiting_tags(int peer) {
    const Lock guard = group_.mesh().lock();
    std::vector<std::uint32_t> tags;
    for (const auto& [key, messages] : incoming_) {
        if (key.first == peer) {
            tags.push_back(key.second);
        }
    }
    return tags;
}

// -- frames ---------------------------------------------------------------------------------------

std::byte* Letters::place_for(int peer, const Header& header) {
    const auto found = arrivals_.find({peer, header.sequence});
    if (found == arrivals_.end() || header.length > found->second.size - found->second.filled) {
        return nullptr;
    }
    return found->second.target + found->second.filled;
}

void Letters::on_frame(int peer, const Header& header, Payload payload) {
    switch (header.kind) {
        case FrameKind::letter: {
            std::uint16_t length = 0;
            if (payload.size < 2) {
                return;
            }
            std::memcpy(&length, payload.memory.get(), 2);
            const std::size_t begins = 2 + std::size_t{length};
            if (begins > payload.size) {
                return;
            }
            const std::uint64_t size = payload.size - begins;
            incoming_[{peer, header.tag}].push_back({false, 0, size, std::move(payload), begins});
            return;
        }
        case FrameKind::offer:
            incoming_[{peer, header.tag}].push_back(
                {true, header.sequence, header.fingerprint, std::move(payload), 0});
            return;
        case FrameKind::withdraw:
            for (auto waiting = incoming_.begin(); waiting != incoming_.end();) {
                std::erase_if(waiting->second, [&](const Incoming& one) {
                    return waiting->first.first == peer && one.is_offer && one.number == header.sequence;
                });
                waiting = waiting->second.empty() ? incoming_.erase(waiting) : std::next(waiting);
            }
            return;
        case FrameKind::accept: {
            const auto found = open_.find(header.sequence);
            if (found == open_.end() || found->second->peer != peer) {
                group_.send(peer, {.kind = FrameKind::abandoned, .sequence = header.sequence});
                return;
            }
            Letter& letter = *found->second;
            if (letter.is_accepted || letter.is_done) {
                return;
            }
            letter.is_accepted = true;
            Mesh& mesh = group_.mesh();
            Link& link = mesh.link(group_.world_rank(peer));
            const std::size_t piece = mesh.options().piece_nbytes;
            for (std::size_t begin = 0; begin < letter.content.size(); begin += piece) {
                const Header part{.kind = FrameKind::content, .group = group_.id(), .sequence = letter.number};
                link.send_in_place(part, letter.content.subspan(begin, std::min(piece, letter.content.size() - begin)),
                                   letter.ticket);
            }
            link.flush();
            return;
        }
        case FrameKind::content: {
            const auto found = arrivals_.find({peer, header.sequence});
            if (found != arrivals_.end() && payload.memory == nullptr) {
                found->second.filled += header.length;
            }
            return;
        }
        case FrameKind::taken:
            if (const auto found = open_.find(header.sequence); found != open_.end()) {
                Letter& letter = *found->second;
                letter.is_done = letter.is_done || (letter.peer == peer && !letter.is_accepted);
            }
            return;
        case FrameKind::abandoned:
            if (const auto found = arrivals_.find({peer, header.sequence}); found != arrivals_.end()) {
                found->second.is_abandoned = true;
            }
            return;
        default:
            return;
    }
}

}  // namespace ferrodist::net
