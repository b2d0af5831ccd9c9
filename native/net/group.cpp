// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/group.hpp"

#include <algorithm>
#include <cstring>
#include <set>

namespace ferrodist::net {
namespace {

constexpr std::int64_t verdict_patience_ns = 1'000'000'000;
constexpr std::int64_t poll_patience_ns = 300'000'000;
constexpr std::size_t longest_report = 4096;
constexpr std::int64_t poll_interval_ns = 500'000'000;
constexpr std::uint64_t still_here = UINT64_MAX;  // more may come of a rank that is connected

Bytes bytes_of(std::string_view text) { return {reinterpret_cast<const std::byte*>(text.data()), text.size()}; }

std::string text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

shm::Watch& nobody() {
    static shm::Watch watch;
    return watch;
}

Patience brief(std::int64_t ns) { return {&nobody(), shm::now_ns() + ns, shm::no_spins}; }

}  // namespace

Group::Group(std::shared_ptr<Mesh> mesh, std::uint64_t id, std::vector<int> members,
             std::shared_ptr<Group> parent)
    : mesh_(std::move(mesh)), id_(id), members_(std::move(members)), parent_(std::move(parent)),
      ranks_by_world_(static_cast<std::size_t>(mesh_->size()), -1), peers_(members_.size()), letters_(*this) {
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
        ranks_by_world_[static_cast<std::size_t>(members_[rank])] = static_cast<int>(rank);
    }
    rank_ = rank_of(mesh_->rank());
    mesh_->add(id_, this);
}

Group::~Group() {
    if (mesh_->is_of_ancestor()) {
        return;  // a lock that the parent's thread held at the fork stays locked
    }
    const Lock guard = mesh_->lock();
    mesh_->remove(id_, this);
}

int Group::rank_of(int world_rank) const { return ranks_by_world_[static_cast<std::size_t>(world_rank)]; }

void Group::send(int rank, Header header, Bytes payload, bool is_urgent) {
    header.group = id_;
    mesh_->send(world_rank(rank), header, payload, is_urgent);
}

void Group::send_to_all(const Header& header, Bytes payload, bool is_urgent) {
    for (int rank = 0; rank < size(); ++rank) {
        if (rank != rank_) {
            send(rank, header, payload, is_urgent);
        }
    }
}

// -- pieces ---------------------------------------------------------------------------------------

Ending Group::enter(std::uint64_t sequence, std::uint32_t kind, std::uint64_t fingerprint) {
    desk_.sequence = sequence;
    desk_.kind = kind;
    desk_.is_inside = 1;
    fingerprint_ = fingerprint;
    for (int rank = 0; rank < size(); ++rank) {
        Peer& peer = peer_of(rank);
        drop_old(peer, rank);
        const bool is_of_call = !peer.pieces.empty() && peer.pieces.front().sequence == sequence;
        if (is_of_call && peer.pieces.front().fingerprint != fingerprint) {
            asked_ = sequence;
        }
    }
    if (last_report_ >= sequence) {  // others wait in this call already
        on_report(rank_, sequence, fingerprint);
    }
    if (find_verdict(sequence) != nullptr) {
        return {Outcome::given_up};
    }
    return asked_ == sequence ? Ending{Outcome::mismatch} : Ending{};
}

bool Group::has_window(int peer, std::uint64_t nbytes) const {
    const Peer& to = peers_[static_cast<std::size_t>(peer)];
    const std::uint64_t ahead = to.sent - to.credited;
    return ahead == 0 || ahead + nbytes <= mesh_->window_nbytes();
}

void Group::send_piece(int peer, Bytes piece, Ticket& ticket) {
    Link& link = mesh_->link(world_rank(peer));
    Header header{.kind = FrameKind::data, .group = id_, .sequence = desk_.sequence, .fingerprint = fingerprint_};
    peer_of(peer).sent += piece.size();
    mesh_->note(true, world_rank(peer), desk_.sequence, piece.size());
    link.send_in_place(header, piece, ticket);
    link.flush();
}

void Group::take_back_pieces(int peer, Ticket& ticket) {
    peer_of(peer).sent -= mesh_->link(world_rank(peer)).detach(ticket);
}

void Group::drop_old(Peer& peer, int rank) {
    while (!peer.pieces.empty() && peer.pieces.front().sequence < desk_.sequence) {
        consume(rank, peer.pieces.front().payload.size);
        peer.pieces.pop_front();
    }
}

// Counts bytes of pieces that are used up, and lets their sender know now and then.
void Group::consume(int rank, std::uint64_t nbytes) {
    Peer& peer = peer_of(rank);
    peer.consumed += nbytes;
    if (peer.consumed - peer.told >= mesh_->window_nbytes() / 4) {
        peer.told = peer.consumed;
        send(rank, {.kind = FrameKind::credit, .sequence = peer.consumed}, {}, true);
    }
}

void Group::forget(int peer) {
    Peer& from = peer_of(peer);
    for (std::size_t i = from.num_filled; i < from.places.size(); ++i) {
        mesh_->link(world_rank(peer)).give_up_place(from.places[i].into, from.places[i].size);
    }
    from.places.clear();
    from.num_filled = 0;
}

// The place that a piece goes to; null if it is not expected yet, or is not what is expected.
Place* Group::next_place(int rank, const Header& header) {
    Peer& from = peer_of(rank);
    const bool is_expected = desk_.is_inside && header.sequence == desk_.sequence && from.pieces.empty() &&
                             header.fingerprint == fingerprint_ && from.num_filled < from.places.size();
    Place* place = is_expected ? &from.places[from.num_filled] : nullptr;
    return place != nullptr && place->size == header.length ? place : nullptr;
}

std::optional<Payload> Group::take_piece(int peer, std::size_t size, Ending& flaw) {
    Peer& from = peer_of(peer);
    if (from.pieces.empty() || from.pieces.front().sequence != desk_.sequence) {
        return std::nullopt;
    }
    Piece& piece = from.pieces.front();
    if (piece.fingerprint != fingerprint_) {
        flaw = {Outcome::mismatch};
        return std::nullopt;
    }
    if (piece.payload.size != size) {
        flaw = {Outcome::corrupt, peer};
        return std::nullopt;
    }
    Payload payload = std::move(piece.payload);
    from.pieces.pop_front();
    consume(peer, size);
    mesh_->note(false, world_rank(peer), desk_.sequence, size);
    return payload;
}

void Group::on_piece(int rank, const Header& header, Payload payload, bool is_void) {
    Peer& from = peer_of(rank);
    from.seen = std::max(from.seen, header.sequence);
    if (is_void || header.sequence < desk_.sequence) {
        consume(rank, header.length);
        return;
    }
    if (header.sequence == desk_.sequence && desk_.is_inside && header.fingerprint != fingerprint_) {
        asked_ = desk_.sequence;  // everybody who waits in this call is going to hear it
    }
    const Place* place = next_place(rank, header);
    if (place == nullptr) {
        from.pieces.push_back({header.sequence, header.fingerprint, std::move(payload)});
        return;
    }
    if (payload.memory != nullptr) {  // it was on its way before it was expected
        std::memcpy(place->into, payload.memory.get(), payload.size);
    }
    ++from.num_filled;
    consume(rank, header.length);
    mesh_->note(false, world_rank(rank), header.sequence, header.length);
}

Ending Group::trouble(int peer) {
    if (find_verdict(desk_.sequence) != nullptr) {
        return {Outcome::verdict};
    }
    if (asked_ == desk_.sequence) {
        return {Outcome::mismatch};
    }
    return peer >= 0 && is_gone(peer) ? loss(peer) : Ending{};
}

Ending Group::slow_trouble() {
    if (const int judge = keeper(); judge == rank_) {
        on_report(rank_, desk_.sequence, fingerprint_);
    } else {
        send(judge, {.kind = FrameKind::report, .sequence = desk_.sequence, .fingerprint = fingerprint_}, {}, true);
    }
    for (int rank = 0; rank < size(); ++rank) {
        if (rank == rank_) {
            continue;
        }
        if (has_left(rank) && peer_of(rank).left_after < desk_.sequence) {
            return {Outcome::lost, rank};
        }
        if (mesh_->is_up(world_rank(rank)) && mesh_->is_silent(world_rank(rank))) {
            return {Outcome::silent, rank};
        }
    }
    return find_dead();
}

// A rank that died counts as lost for this call only if the call still needs something from it. That is
// certain when nobody who is left has got anything of this call from it: for all have to hear of all.
Ending Group::find_dead() {
    const auto is_dead = [&](int rank) { return rank != rank_ && !has_left(rank) && is_gone(rank); };
    for (int dead = 0; dead < size(); ++dead) {
        if (!is_dead(dead)) {
            continue;
        }
        bool is_certain = peer_of(dead).seen < desk_.sequence;
        for (int rank = 0; rank < size() && is_certain; ++rank) {
            const Peer& other = peer_of(rank);
            if (rank != rank_ && !is_gone(rank)) {
                const auto& seen = other.has_seen;
                is_certain = other.desk.poll >= last_poll_ && last_poll_ > 0 && seen.size() == members_.size() &&
                             seen[static_cast<std::size_t>(dead)] < desk_.sequence;
            }
        }
        if (is_certain) {
            return loss(dead);
        }
        if (shm::now_ns() >= next_poll_ns_) {
            next_poll_ns_ = shm::now_ns() + poll_interval_ns;
            last_poll_ = mesh_->new_number();
            send_to_all({.kind = FrameKind::poll, .sequence = last_poll_}, {}, true);
        }
    }
    return {};
}

std::uint64_t Group::seen_of(int rank) const {
    return is_gone(rank) ? peers_[static_cast<std::size_t>(rank)].seen : still_here;
}

Ending Group::look_round() {
    const Lock guard = mesh_->lock();
    return find_verdict(desk_.sequence) != nullptr ? Ending{Outcome::verdict} : slow_trouble();
}

Ending Group::loss(int rank) const {
    const bool is_corrupt = mesh_->link(world_rank(rank)).state() == Link::State::corrupt;
    return {is_corrupt ? Outcome::corrupt : Outcome::lost, rank};
}

bool Group::takes_no_more(int rank) const {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    return is_gone(rank) || (peer.is_closing && peer.num_receives == 0);
}

// -- verdicts -------------------------------------------------------------------------------------

const Group::Verdict* Group::find_verdict(std::uint64_t sequence) const {
    for (const Verdict& verdict : verdicts_) {
        if (verdict.sequence <= sequence) {
            return &verdict;
        }
    }
    return parent_ == nullptr ? nullptr : parent_->find_verdict(0);
}

std::optional<std::string> Group::verdict(std::uint64_t sequence) {
    const Lock guard = mesh_->lock();
    const Verdict* found = find_verdict(sequence);
    return found == nullptr ? std::nullopt : std::optional(found->text);
}

void Group::give_verdict(std::uint64_t sequence, std::string_view text) {
    Lock guard = mesh_->lock();
    const Patience patience = brief(verdict_patience_ns);
    Waiter waiter(*mesh_, guard, patience);
    for (int asked = -1; find_verdict(sequence) == nullptr;) {
        const int judge = keeper();
        if (judge == rank_) {
            on_propose(sequence, bytes_of(text));
            return;
        }
        if (judge != asked) {
            asked = judge;
            send(judge, {.kind = FrameKind::propose, .sequence = sequence}, bytes_of(text), true);
        }
        if (waiter.until_change(mesh_->tick()).failed()) {  // it does not answer: this rank's own, then
            verdicts_.push_back({sequence, std::string(text)});
        }
    }
}

int Group::keeper() const {
    int rank = 0;
    while (rank != rank_ && is_gone(rank)) {
        ++rank;
    }
    return rank;
}

void Group::on_propose(std::uint64_t sequence, Bytes text) {
    const bool is_needed = std::all_of(verdicts_.begin(), verdicts_.end(), [&](const Verdict& given) {
        return given.sequence > sequence;
    });
    if (is_needed) {
        verdicts_.push_back({sequence, text_of(text)});
        send_to_all({.kind = FrameKind::verdict, .sequence = sequence}, text, true);
    }
}

// -- differences ----------------------------------------------------------------------------------

Ending Group::hear_all(std::uint64_t sequence, Bytes statement, const Patience& patience,
                       std::vector<std::string>& statements) {
    Lock guard = mesh_->lock();
    Waiter waiter(*mesh_, guard, patience);
    const int judge = keeper();
    if (judge == rank_) {
        Payload copy{new_memory(statement.size()), statement.size()};
        std::copy(statement.begin(), statement.end(), copy.memory.get());
        on_differ(rank_, sequence, std::move(copy));
    } else {
        send(judge, {.kind = FrameKind::differ, .sequence = sequence}, statement, true);
    }
    while (true) {
        const auto& heard = heard_statements_;
        const bool is_whole = heard_ == sequence && std::all_of(heard.begin(), heard.end(), [](const auto& one) {
            return one.has_value();
        });
        if (is_whole) {
            for (const auto& one : heard) {
                statements.push_back(*one);
            }
            return {};
        }
        if (find_verdict(sequence) != nullptr) {
            return {Outcome::verdict};
        }
        for (int rank = 0; rank < size(); ++rank) {
            if (rank != rank_ && is_gone(rank)) {
                return loss(rank);
            }
        }
        if (waiter.is_time_to_look()) {
            if (const Ending ending = slow_trouble(); ending.failed()) {
                return ending;
            }
        }
        if (const Ending ending = waiter.until_change(mesh_->tick()); ending.failed()) {
            return ending;
        }
    }
}

// On the keeper: ranks that wait in one call and differ in it may wait for ever, each for others.
void Group::on_report(int rank, std::uint64_t sequence, std::uint64_t fingerprint) {
    last_report_ = std::max(last_report_, sequence);
    peer_of(rank).reported = sequence;
    peer_of(rank).reported_fingerprint = fingerprint;
    for (const Peer& other : peers_) {
        if (other.reported == sequence && other.reported_fingerprint != fingerprint) {
            ask_all(sequence);
        }
    }
}

void Group::ask_all(std::uint64_t sequence) {
    if (sequence > stated_) {
        stated_ = asked_ = sequence;
        statements_.assign(members_.size(), std::nullopt);
        send_to_all({.kind = FrameKind::ask, .sequence = sequence}, {}, true);
    }
}

// On the keeper: collects what all have called, and hands it to all.
void Group::on_differ(int rank, std::uint64_t sequence, Payload payload) {
    if (sequence < stated_) {
        return;
    }
    ask_all(sequence);
    statements_[static_cast<std::size_t>(rank)] = text_of(payload.bytes());
    if (std::any_of(statements_.begin(), statements_.end(), [](const auto& one) { return !one; })) {
        return;
    }
    for (std::size_t from = 0; from < statements_.size(); ++from) {
        const Header header{.kind = FrameKind::statement, .tag = static_cast<std::uint32_t>(from),
                            .sequence = sequence};
        send_to_all(header, bytes_of(*statements_[from]), true);
        on_statement(header, bytes_of(*statements_[from]));
    }
}

void Group::on_statement(const Header& header, Bytes text) {
    if (header.tag >= members_.size()) {
        return;
    }
    if (header.sequence != heard_) {
        heard_ = header.sequence;
        heard_statements_.assign(members_.size(), std::nullopt);
    }
    heard_statements_[header.tag] = text_of(text);
}

// -- who does what --------------------------------------------------------------------------------

void Group::poll_all() {
    Lock guard = mesh_->lock();
    const std::uint64_t poll = mesh_->new_number();
    send_to_all({.kind = FrameKind::poll, .sequence = poll}, {}, true);
    const Patience patience = brief(poll_patience_ns);
    Waiter waiter(*mesh_, guard, patience);
    const auto is_answered = [&](int rank) { return rank == rank_ || is_gone(rank) || peer_of(rank).desk.poll == poll; };
    while (true) {
        bool is_complete = true;
        for (int rank = 0; rank < size(); ++rank) {
            is_complete = is_complete && is_answered(rank);
        }
        if (is_complete || waiter.until_change(mesh_->tick()).failed()) {
            return;
        }
    }
}

void Group::on_poll(int rank, std::uint64_t poll) {
    Desk desk = desk_;
    desk.poll = poll;
    std::string answer(reinterpret_cast<const char*>(&desk), sizeof desk);
    for (int other = 0; other < size(); ++other) {
        const std::uint64_t seen = seen_of(other);
        answer.append(reinterpret_cast<const char*>(&seen), sizeof seen);
    }
    answer += mesh_->reports[static_cast<std::size_t>(mesh_->rank())].substr(0, longest_report);
    send(rank, {.kind = FrameKind::desk}, bytes_of(answer), true);
}

void Group::on_desk(int rank, Bytes payload) {
    const std::size_t seen_nbytes = members_.size() * sizeof(std::uint64_t);
    if (payload.size() < sizeof(Desk) + seen_nbytes) {
        return;
    }
    std::vector<std::uint64_t>& has_seen = peer_of(rank).has_seen;
    has_seen.resize(members_.size());
    std::memcpy(has_seen.data(), payload.data() + sizeof(Desk), seen_nbytes);
    Desk& desk = peer_of(rank).desk;
    std::memcpy(&desk, payload.data(), sizeof(Desk));
    if (desk.waiting_for >= size()) {
        desk.waiting_for = -1;
    }
    mesh_->reports[static_cast<std::size_t>(world_rank(rank))] = text_of(payload.subspan(sizeof(Desk) + seen_nbytes));
}

std::vector<int> Group::missing() {
    poll_all();
    const Lock guard = mesh_->lock();
    std::vector<int> absent, stuck;
    std::set<int> awaited;
    for (int rank = 0; rank < size(); ++rank) {
        const Desk& desk = rank == rank_ ? desk_ : peer_of(rank).desk;
        if (desk.sequence < desk_.sequence) {
            absent.push_back(rank);
        } else if (desk.sequence == desk_.sequence && desk.is_inside) {
            if (desk.waiting_for >= 0) {
                awaited.insert(desk.waiting_for);
            } else if (rank != rank_ && desk.waiting_for != waits_elsewhere) {
                stuck.push_back(rank);
            }
        }
    }
    if (!absent.empty()) {
        return absent;
    }
    if (stuck.empty() && awaited.empty() && last_awaited_ >= 0) {
        awaited.insert(last_awaited_);
    }
    return !stuck.empty() ? stuck : std::vector<int>(awaited.begin(), awaited.end());
}

std::pair<std::uint64_t, std::uint32_t> Group::last_call(int rank) {
    const Lock guard = mesh_->lock();
    const Desk& desk = rank == rank_ ? desk_ : peer_of(rank).desk;
    return {desk.sequence, desk.kind};
}

std::vector<int> Group::find_ring(int peer) {
    poll_all();
    const Lock guard = mesh_->lock();
    std::vector<int> ring{rank_};
    for (int next = peer; next != rank_; next = peer_of(next).desk.sending_to) {
        if (next < 0 || next >= size() || std::find(ring.begin(), ring.end(), next) != ring.end()) {
            ring.clear();
            break;
        }
        ring.push_back(next);
    }
    if (ring.empty()) {
        ring = ring_;  // somebody else in it found it first
    } else {
        std::rotate(ring.begin(), std::min_element(ring.begin(), ring.end()), ring.end());
        for (const int rank : ring) {
            if (rank != rank_) {
                send(rank, {.kind = FrameKind::ring}, std::as_bytes(std::span(ring)), true);
            }
        }
    }
    return ring;
}

void Group::on_ring(Bytes payload) {
    ring_.clear();
    for (std::size_t i = 0; i + sizeof(int) <= payload.size(); i += sizeof(int)) {
        int rank;
        std::memcpy(&rank, payload.data() + i, sizeof rank);
        if (rank < 0 || rank >= size()) {
            ring_.clear();
            return;
        }
        ring_.push_back(rank);
    }
}

// -- leaving --------------------------------------------------------------------------------------

void Group::announce_closing() {
    const Lock guard = mesh_->lock();
    is_closing_ = true;
    send_to_all({.kind = FrameKind::closing, .sequence = num_receives_});
}

void Group::line_up(int change) {
    const Lock guard = mesh_->lock();
    num_receives_ += static_cast<std::uint64_t>(change);
    if (is_closing_ && !has_left(rank_)) {  // senders may wait for a receive that never comes
        send_to_all({.kind = FrameKind::closing, .sequence = num_receives_});
    }
}

void Group::leave(std::string_view departure, std::uint64_t after) {
    const Lock guard = mesh_->lock();
    if (has_left(rank_)) {
        return;
    }
    peer_of(rank_).has_left = true;
    send_to_all({.kind = FrameKind::left, .sequence = after}, bytes_of(departure));
    mesh_->remove(id_, this);
    mesh_->changed();
}

bool Group::has_left() {
    const Lock guard = mesh_->lock();
    return has_left(rank_);
}

std::optional<std::string> Group::departure_of(int rank) {
    const Lock guard = mesh_->lock();
    const Peer& peer = peer_of(rank);
    return peer.has_left ? std::optional(peer.departure) : std::nullopt;
}

std::string Group::flaw_of(int rank) {
    const Lock guard = mesh_->lock();
    return mesh_->link(world_rank(rank)).flaw();
}

std::int64_t Group::waited_ns(int rank) {
    const Lock guard = mesh_->lock();
    return peer_of(rank).waited_ns;
}

void Group::on_unjoin(int world_rank) {
    if (const int rank = rank_of(world_rank); rank >= 0) {
        peer_of(rank).has_left = true;
    }
}

// -- frames ---------------------------------------------------------------------------------------

std::byte* Group::place_for(int world_rank, const Header& header) {
    const int rank = rank_of(world_rank);
    if (rank < 0) {
        return nullptr;
    }
    if (header.kind == FrameKind::content) {
        return letters_.place_for(rank, header);
    }
    const Place* place = header.kind == FrameKind::data ? next_place(rank, header) : nullptr;
    return place == nullptr ? nullptr : place->into;
}

void Group::on_frame(int world_rank, const Header& header, Payload payload, bool is_void) {
    const int rank = rank_of(world_rank);
    if (rank < 0) {
        return;  // of another group that happens to have this number: no member of ours
    }
    Peer& peer = peer_of(rank);
    switch (header.kind) {
        case FrameKind::data:
            return on_piece(rank, header, std::move(payload), is_void);
        case FrameKind::credit:
            peer.credited = std::min(header.sequence, peer.sent);
            return;
        case FrameKind::closing:
            peer.is_closing = true;
            peer.num_receives = header.sequence;
            return;
        case FrameKind::left:
            peer.has_left = true;
            peer.left_after = header.sequence;
            peer.departure = text_of(payload.bytes());
            return;
        case FrameKind::propose:
            return on_propose(header.sequence, payload.bytes());
        case FrameKind::verdict:
            verdicts_.push_back({header.sequence, text_of(payload.bytes())});
            return;
        case FrameKind::differ:
            return on_differ(rank, header.sequence, std::move(payload));
        case FrameKind::ask:
            asked_ = std::max(asked_, header.sequence);
            return;
        case FrameKind::statement:
            return on_statement(header, payload.bytes());
        case FrameKind::report:
            return on_report(rank, header.sequence, header.fingerprint);
        case FrameKind::poll:
            return on_poll(rank, header.sequence);
        case FrameKind::desk:
            return on_desk(rank, payload.bytes());
        case FrameKind::ring:
            return on_ring(payload.bytes());
        default:
            return letters_.on_frame(rank, header, std::move(payload));
    }
}

}  // namespace ferrodist::net
