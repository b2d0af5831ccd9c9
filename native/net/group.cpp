// SPDX-License-Identifier: MIT OR Apache-2.0
// The pieces of collectives, who is there, and which frame goes where.
#include "net/group.hpp"

#include <algorithm>
#include <cstring>

namespace ferrodist::net {
namespace {

constexpr std::size_t most_pieces = 65536;  // empty ones have no bytes to count

}  // namespace

Group::Group(std::shared_ptr<Mesh> mesh, std::uint64_t id, std::vector<int> members,
             std::shared_ptr<Group> parent)
    : mesh_(std::move(mesh)), id_(id), members_(std::move(members)),
      rank_(static_cast<int>(std::ranges::find(members_, mesh_->rank()) - members_.begin())), parent_(std::move(parent)),
      ranks_by_world_(static_cast<std::size_t>(mesh_->size()), -1), peers_(members_.size()),
      messages_(*this, static_cast<int>(members_.size())) {
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
        ranks_by_world_[static_cast<std::size_t>(members_[rank])] = static_cast<int>(rank);
    }
    mesh_->add(id_, this);
}

Group::~Group() {
    if (mesh_->is_of_ancestor()) {
        return;  // a lock that the parent's thread held at the fork stays locked
    }
    const Lock guard = mesh_->lock();
    messages_.end_all();
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

Status Group::enter(std::uint64_t sequence, std::uint32_t kind, std::uint64_t fingerprint) {
    if (sequence >= own_status_.barred_from) {
        return {StatusCode::given_up};
    }
    const bool was_in_call = own_status_.sequence == sequence;  // with an earlier part of it
    ++own_status_.num_moves;
    own_status_.sequence = sequence;
    own_status_.kind = kind;
    own_status_.is_inside = 1;
    fingerprint_ = fingerprint;
    for (int rank = 0; rank < size(); ++rank) {
        Peer& peer = peer_of(rank);
        drop_old(peer, rank);
        const bool is_of_call = !peer.pieces.empty() && peer.pieces.front().sequence == sequence;
        if (is_of_call && peer.pieces.front().fingerprint != fingerprint) {
            note_difference(sequence);
        }
    }
    if (last_report_ >= sequence) {  // others wait in this call already
        on_report(rank_, sequence, fingerprint);
    }
    if (find_error(sequence) != nullptr) {
        return {was_in_call ? StatusCode::group_error : StatusCode::given_up};
    }
    return asked_ == sequence ? Status{StatusCode::mismatch} : Status{};
}

bool Group::has_window(int peer, std::uint64_t nbytes) const {
    const Peer& to = peers_[static_cast<std::size_t>(peer)];
    const std::uint64_t ahead = to.sent - to.credited;
    return ahead == 0 || ahead + nbytes <= mesh_->window_nbytes();
}

void Group::send_piece(int peer, Bytes piece, Ticket& ticket) {
    Link& link = mesh_->link(world_rank(peer));
    Header header{.kind = FrameKind::data, .group = id_, .sequence = own_status_.sequence, .fingerprint = fingerprint_};
    peer_of(peer).sent += piece.size();
    ++own_status_.num_moves;
    mesh_->note(true, world_rank(peer), own_status_.sequence, piece.size());
    link.send_in_place(header, piece, ticket);
    link.flush();
}

void Group::take_back_pieces(int peer, Ticket& ticket) {
    Peer& to = peer_of(peer);
    to.sent -= mesh_->link(world_rank(peer)).detach(ticket);
    to.credited = std::min(to.credited, to.sent);
}

// Keeps a piece that came too early. A sender that keeps to the window never has more of them here.
void Group::keep_piece(int rank, Piece piece) {
    Peer& from = peer_of(rank);
    from.kept_nbytes += piece.payload.size;
    if (from.kept_nbytes > mesh_->window_nbytes() + mesh_->options().piece_nbytes ||
        from.pieces.size() >= most_pieces) {
        mesh_->link(world_rank(rank)).refuse("it sends more than it was let");
        return;
    }
    from.pieces.push_back(std::move(piece));
}

Payload Group::take_first(Peer& from) {
    Payload payload = std::move(from.pieces.front().payload);
    from.kept_nbytes -= payload.size;
    from.pieces.pop_front();
    return payload;
}

void Group::drop_old(Peer& peer, int rank) {
    while (!peer.pieces.empty() && peer.pieces.front().sequence < own_status_.sequence) {
        consume(rank, take_first(peer).size);
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
    const bool is_expected = own_status_.is_inside && header.sequence == own_status_.sequence && from.pieces.empty() &&
                             header.sequence < from.refused_from &&
                             header.fingerprint == fingerprint_ && from.num_filled < from.places.size();
    Place* place = is_expected ? &from.places[from.num_filled] : nullptr;
    return place != nullptr && place->size == header.length ? place : nullptr;
}

std::optional<Payload> Group::take_piece(int peer, std::size_t size, Status& flaw) {
    Peer& from = peer_of(peer);
    if (from.pieces.empty() || from.pieces.front().sequence != own_status_.sequence) {
        return std::nullopt;
    }
    Piece& piece = from.pieces.front();
    if (piece.fingerprint != fingerprint_) {
        flaw = {StatusCode::mismatch};
        return std::nullopt;
    }
    if (piece.payload.size != size) {
        flaw = {StatusCode::corrupt, peer};
        return std::nullopt;
    }
    Payload payload = take_first(from);
    consume(peer, size);
    mesh_->note(false, world_rank(peer), own_status_.sequence, size);
    return payload;
}

void Group::on_piece(int rank, const Header& header, Payload payload, bool is_void) {
    Peer& from = peer_of(rank);
    if (header.sequence >= from.refused_from) {
        consume(rank, header.length);
        return;
    }
    own_status_.num_moves += 1 + header.length;
    from.seen = std::max(from.seen, header.sequence);
    if (is_void || header.sequence < own_status_.sequence) {
        consume(rank, header.length);
        return;
    }
    if (header.sequence == own_status_.sequence && own_status_.is_inside && header.fingerprint != fingerprint_) {
        note_difference(own_status_.sequence);  // everybody who waits in this call is going to hear it
    }
    const Place* place = next_place(rank, header);
    if (place == nullptr) {
        keep_piece(rank, {header.sequence, header.fingerprint, std::move(payload)});
        return;
    }
    if (payload.memory != nullptr) {  // it was on its way before it was expected
        std::memcpy(place->into, payload.memory.get(), payload.size);
    }
    ++from.num_filled;
    if (header.length >= large_payload) {  // what comes behind it has no place yet, but soon has one
        mesh_->link(world_rank(rank)).pause();
    }
    consume(rank, header.length);
    mesh_->note(false, world_rank(rank), header.sequence, header.length);
}

Status Group::trouble(int peer) {
    if (find_error(own_status_.sequence) != nullptr) {
        return {StatusCode::group_error};
    }
    if (asked_ == own_status_.sequence) {
        return {StatusCode::mismatch};
    }
    return peer >= 0 && is_gone(peer) ? loss(peer) : Status{};
}

Status Group::slow_trouble() {
    if (const int judge = coordinator(); judge == rank_) {
        on_report(rank_, own_status_.sequence, fingerprint_);
    } else {
        send(judge, {.kind = FrameKind::report, .sequence = own_status_.sequence, .fingerprint = fingerprint_}, {}, true);
    }
    for (int rank = 0; rank < size(); ++rank) {
        if (rank == rank_) {
            continue;
        }
        if (has_left(rank) && peer_of(rank).left_after < own_status_.sequence) {
            return {StatusCode::lost, rank};
        }
        if (mesh_->is_up(world_rank(rank)) && mesh_->lacks_heartbeat(world_rank(rank))) {
            return {StatusCode::no_heartbeat, rank};
        }
    }
    return find_dead();
}

Status Group::poll_all() {
    const Lock guard = mesh_->lock();
    return find_error(own_status_.sequence) != nullptr ? Status{StatusCode::group_error} : slow_trouble();
}

Status Group::loss(int rank) const {
    const bool is_corrupt = mesh_->link(world_rank(rank)).state() == Link::State::corrupt;
    return {is_corrupt ? StatusCode::corrupt : StatusCode::lost, rank};
}

bool Group::takes_no_more(int rank) const {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    return is_gone(rank) || (peer.is_closing && peer.num_receives == 0);
}

// -- leaving --------------------------------------------------------------------------------------

void Group::announce_closing() {
    if (mesh_->is_of_ancestor()) {
        return;
    }
    const Lock guard = mesh_->lock();
    peer_of(rank_).is_closing = true;
    send_to_all({.kind = FrameKind::closing, .sequence = num_receives_});
}

void Group::count_receives(int change) {
    num_receives_ += static_cast<std::uint64_t>(change);
    if (has_closed(rank_) && !has_left(rank_)) {  // senders may wait for a receive that never comes
        send_to_all({.kind = FrameKind::closing, .sequence = num_receives_});
    }
}

void Group::leave(std::string_view leave_reason, std::uint64_t after) {
    if (mesh_->is_of_ancestor()) {
        return;
    }
    const Lock guard = mesh_->lock();
    if (has_left(rank_)) {
        return;
    }
    peer_of(rank_).has_left = true;
    send_to_all({.kind = FrameKind::left, .sequence = after}, bytes_of(leave_reason));
    mesh_->remove(id_, this);
    mesh_->changed();
}

bool Group::has_left() {
    if (mesh_->is_of_ancestor()) {
        return true;
    }
    const Lock guard = mesh_->lock();
    return has_left(rank_);
}

std::optional<std::string> Group::leave_reason_of(int rank) {
    const Lock guard = mesh_->lock();
    const Peer& peer = peer_of(rank);
    return peer.has_left ? std::optional(peer.leave_reason) : std::nullopt;
}

std::string Group::flaw_of(int rank) {
    const Lock guard = mesh_->lock();
    return mesh_->link(world_rank(rank)).flaw();
}

std::int64_t Group::waited_ns(int rank, int for_rank) {
    const Lock guard = mesh_->lock();
    return rank == rank_ ? peer_of(for_rank).waited_ns : 0;
}

void Group::on_unjoin(int world_rank) {
    if (const int rank = rank_of(world_rank); rank >= 0 && parent_ != nullptr) {  // nobody joins the group of all
        peer_of(rank).has_left = true;
    }
}

// -- frames ---------------------------------------------------------------------------------------

std::byte* Group::place_for(int world_rank, const Header& header) {
    const int rank = rank_of(world_rank);
    if (rank < 0) {
        return nullptr;
    }
    if (header.kind == FrameKind::bulk) {
        return messages_.place_for(rank, header);
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
            mesh_->check_requests();
            peer.is_closing = true;
            peer.num_receives = header.sequence;
            return;
        case FrameKind::left:
            mesh_->check_requests();
            peer.has_left = true;
            peer.left_after = header.sequence;
            peer.leave_reason = text_of(payload.bytes());
            return;
        case FrameKind::propose:
            return on_propose(header.sequence, payload.bytes());
        case FrameKind::group_error:
            mesh_->check_requests();
            if (find_error(header.sequence) == nullptr) {
                errors_.push_back({header.sequence, text_of(payload.bytes())});
            }
            return;
        case FrameKind::differ:
            return on_differ(rank, header.sequence, std::move(payload));
        case FrameKind::ask:
            return note_difference(header.sequence);
        case FrameKind::descriptor:
            return on_descriptor(header, payload.bytes());
        case FrameKind::report:
            return on_report(rank, header.sequence, header.fingerprint);
        case FrameKind::poll:
            return on_poll(rank, header.sequence);
        case FrameKind::bar:
            return on_bar(rank, header, payload.bytes());
        case FrameKind::rank_status:
            return on_rank_status(rank, payload.bytes());
        case FrameKind::ring:
            return on_ring(payload.bytes());
        default:
            return messages_.on_frame(rank, header, std::move(payload), is_void);
    }
}

}  // namespace ferrodist::net
