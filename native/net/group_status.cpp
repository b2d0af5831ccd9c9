// SPDX-License-Identifier: MIT OR Apache-2.0
// Who does what: ranks ask each other, and whose thread is asked answers for it.
#include <algorithm>
#include <cstring>
#include <set>

#include "net/group.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {
namespace {

constexpr std::int64_t poll_wait_ns = 300'000'000;
constexpr std::int64_t poll_interval_ns = 500'000'000;
constexpr std::size_t longest_report = 4096;
constexpr std::uint64_t still_here = UINT64_MAX;  // more may come of a rank that is connected
constexpr std::uint64_t never = UINT64_MAX;       // no call

}  // namespace

// -- who does what --------------------------------------------------------------------------------

void Group::poll_all(Lock& guard) {
    const std::uint64_t poll = mesh_->new_number();
    send_to_all({.kind = FrameKind::poll, .sequence = poll}, {}, true);
    const WaitOptions options = brief(poll_wait_ns);
    Waiter waiter(*mesh_, guard, options);
    const auto is_answered = [&](int rank) {
        return rank == rank_ || is_gone(rank) || peer_of(rank).rank_status.poll == poll;
    };
    while (true) {
        bool is_complete = true;
        for (int rank = 0; rank < size(); ++rank) {
            is_complete = is_complete && is_answered(rank);
        }
        if (is_complete || waiter.until_change(mesh_->epoch()).failed()) {
            return;
        }
    }
}

void Group::on_poll(int rank, std::uint64_t poll) {
    RankStatus rank_status = own_status_;
    rank_status.poll = poll;
    rank_status.num_moves = moves_here();
    std::string answer(reinterpret_cast<const char*>(&rank_status), sizeof rank_status);
    for (int other = 0; other < size(); ++other) {
        const std::uint64_t seen = seen_of(other);
        answer.append(reinterpret_cast<const char*>(&seen), sizeof seen);
    }
    answer += mesh_->reports[static_cast<std::size_t>(mesh_->rank())].substr(0, longest_report);
    send(rank, {.kind = FrameKind::rank_status}, bytes_of(answer), true);
}

void Group::on_rank_status(int rank, Bytes payload) {
    const std::size_t seen_nbytes = members_.size() * sizeof(std::uint64_t);
    if (payload.size() < sizeof(RankStatus) + seen_nbytes) {
        return;
    }
    std::vector<std::uint64_t>& has_seen = peer_of(rank).has_seen;
    has_seen.resize(members_.size());
    std::memcpy(has_seen.data(), payload.data() + sizeof(RankStatus), seen_nbytes);
    RankStatus& rank_status = peer_of(rank).rank_status;
    std::memcpy(&rank_status, payload.data(), sizeof(RankStatus));
    if (rank_status.waiting_for >= size()) {
        rank_status.waiting_for = -1;
    }
    mesh_->reports[static_cast<std::size_t>(world_rank(rank))] = text_of(payload.subspan(sizeof(RankStatus) + seen_nbytes));
}

std::vector<int> Group::missing() {
    Lock guard = mesh_->lock();
    if (expired_ == own_status_.sequence && !given_up_for_.empty()) {
        return given_up_for_;
    }
    poll_all(guard);
    return find_missing();
}

std::vector<int> Group::find_missing() const {
    std::vector<int> absent, stuck;
    std::set<int> awaited;
    for (int rank = 0; rank < size(); ++rank) {
        const RankStatus& rank_status = rank == rank_ ? own_status_ : peer_of(rank).rank_status;
        if (rank != rank_ && is_gone(rank)) {
            continue;  // a rank that still needs it finds it lost
        }
        if (rank_status.sequence < own_status_.sequence) {
            absent.push_back(rank);
        } else if (rank_status.sequence == own_status_.sequence && rank_status.is_inside) {
            if (rank_status.waiting_for >= 0) {
                awaited.insert(rank_status.waiting_for);
            } else if (rank != rank_ && rank_status.waiting_for != waits_elsewhere) {
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
    const RankStatus& rank_status = rank == rank_ ? own_status_ : peer_of(rank).rank_status;
    return {rank_status.sequence, rank_status.kind};
}

std::vector<int> Group::find_send_cycle(int peer) {
    Lock guard = mesh_->lock();
    poll_all(guard);
    std::vector<int> ring{rank_};
    for (int next = peer; next != rank_; next = peer_of(next).rank_status.sending_to) {
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

// A rank that died counts as lost for this call only if the call still needs something from it. That is
// certain when nobody who is left has got anything of this call from it: for all have to hear of all.
Status Group::find_dead() {
    if (leaves_deaths) {
        return {};
    }
    const auto is_dead = [&](int rank) { return rank != rank_ && !has_left(rank) && is_gone(rank); };
    for (int dead = 0; dead < size(); ++dead) {
        if (!is_dead(dead)) {
            continue;
        }
        bool is_certain = peer_of(dead).seen < own_status_.sequence;
        for (int rank = 0; rank < size() && is_certain; ++rank) {
            const Peer& other = peer_of(rank);
            if (rank != rank_ && !is_gone(rank)) {
                const auto& seen = other.has_seen;
                is_certain = other.rank_status.poll >= last_poll_ && last_poll_ > 0 && seen.size() == members_.size() &&
                             seen[static_cast<std::size_t>(dead)] < own_status_.sequence;
            }
        }
        if (is_certain) {
            return loss(dead);
        }
        if (core::now_ns() >= next_poll_ns_) {
            next_poll_ns_ = core::now_ns() + poll_interval_ns;
            last_poll_ = mesh_->new_number();
            send_to_all({.kind = FrameKind::poll, .sequence = last_poll_}, {}, true);
        }
    }
    return {};
}

std::uint64_t Group::seen_of(int rank) const {
    return is_gone(rank) || is_refused(rank) ? peer_of(rank).seen : still_here;
}

// -- barring --------------------------------------------------------------------------------------

bool Group::is_refused(int rank) const { return peer_of(rank).refused_from != never; }

void Group::refuse(int rank, std::uint64_t sequence) {
    Peer& peer = peer_of(rank);
    if (rank != rank_ && peer.seen < sequence) {
        peer.refused_from = std::min(peer.refused_from, sequence);
    }
}

void Group::on_bar(int rank, const Header& header, Bytes payload) {
    if (header.fingerprint == 0) {
        return;  // no call has it
    }
    if (own_status_.sequence < header.fingerprint) {
        own_status_.barred_from = std::min(own_status_.barred_from, header.fingerprint);
    }
    for (std::size_t i = 0; i + sizeof(int) <= payload.size(); i += sizeof(int)) {
        int silent;
        std::memcpy(&silent, payload.data() + i, sizeof silent);
        if (silent >= 0 && silent < size()) {
            refuse(silent, header.fingerprint);
        }
    }
    on_poll(rank, header.sequence);
}

// Asks all ranks whether they have entered the current call, and returns those that did not answer.
std::vector<int> Group::ask_in_call(Lock& lock, const std::vector<int>& refused) {
    for (const int rank : refused) {
        refuse(rank, own_status_.sequence);
    }
    const std::uint64_t question = mesh_->new_number();
    const WaitOptions options = brief(mesh_->options().answer_ns);
    Waiter waiter(*mesh_, lock, options);
    send_to_all({.kind = FrameKind::bar, .sequence = question, .fingerprint = own_status_.sequence},
                std::as_bytes(std::span(refused)), true);
    while (true) {
        std::vector<int> silent;
        bool is_awaited = false;
        for (int rank = 0; rank < size(); ++rank) {
            if (rank != rank_ && !is_gone(rank) && peer_of(rank).rank_status.poll < question) {
                silent.push_back(rank);
                is_awaited = is_awaited || std::find(refused.begin(), refused.end(), rank) == refused.end();
            }
        }
        if (!is_awaited || find_error(own_status_.sequence) != nullptr || waiter.until_change(mesh_->epoch()).failed()) {
            return silent;
        }
    }
}

// Who takes no part in the current call: those that have said so, and those that say nothing and of whom nobody has
// had a piece.
std::vector<int> Group::find_barred(const std::vector<int>& silent) const {
    std::vector<int> barred;
    for (int rank = 0; rank < size(); ++rank) {
        if (rank == rank_ || is_gone(rank)) {
            continue;  // a rank that still needs it finds it lost
        }
        if (std::find(silent.begin(), silent.end(), rank) == silent.end()) {
            if (peer_of(rank).rank_status.barred_from <= own_status_.sequence) {
                barred.push_back(rank);
            }
            continue;
        }
        bool is_unseen = peer_of(rank).seen < own_status_.sequence;
        for (int other = 0; other < size() && is_unseen; ++other) {
            const bool has_answered = other != rank_ && other != rank && !is_gone(other) &&
                                      std::find(silent.begin(), silent.end(), other) == silent.end();
            const auto& seen = peer_of(other).has_seen;
            is_unseen = !has_answered || (seen.size() == members_.size() &&
                                          seen[static_cast<std::size_t>(rank)] < own_status_.sequence);
        }
        if (is_unseen) {
            barred.push_back(rank);
        }
    }
    return barred;
}

// What has moved here so far, down to the bytes of a piece that is on its way.
std::uint64_t Group::moves_here() const {
    std::uint64_t moves = own_status_.num_moves;
    for (const int member : members_) {
        moves += member == mesh_->rank() ? 0 : mesh_->link(member).num_filled(id_);
    }
    return moves;
}

// The same on all ranks, as they have answered.
std::uint64_t Group::count_moves(std::uint64_t here) const {
    std::uint64_t moves = here;
    for (int rank = 0; rank < size(); ++rank) {
        moves += rank == rank_ ? 0 : peer_of(rank).rank_status.num_moves;
    }
    return moves;
}

Status Group::give_up(std::vector<int> missing, bool are_barred) {
    given_up_for_ = std::move(missing);
    has_barred_ = are_barred;
    return {StatusCode::late};
}

// Whether the current call waits for ranks none of which is stuck in another call.
bool Group::may_still_come(Lock& lock, const WaitOptions& options) {
    poll_all(lock);
    std::vector<int> missing = find_missing();
    std::erase(missing, rank_);
    return !missing.empty() && std::all_of(missing.begin(), missing.end(), [&](int rank) {
        return mesh_->held_ns(world_rank(rank)) < options.patience.stuck_ns;
    });
}

Status Group::expire(Lock& lock, const WaitOptions& options) {
    if (options.is_patient()) {
        // Their heartbeats say nothing new any sooner.
        const bool is_due = core::now_ns() >= next_look_ns_;
        if (!is_due || may_still_come(lock, options)) {
            next_look_ns_ = is_due ? core::now_ns() + mesh_->options().heartbeat_ns : next_look_ns_;
            options.deadline_ns = next_look_ns_;
            return {};
        }
    }
    const std::int64_t now = core::now_ns();
    const bool is_first = expired_ != own_status_.sequence;
    if (!is_first && now < next_expiry_ns_) {
        options.deadline_ns = next_expiry_ns_;
        return {};
    }
    if (is_first) {
        expired_ = own_status_.sequence;
        given_up_for_.clear();
        last_moves_ = 0;
    }
    const std::uint64_t here = moves_here();
    std::vector<int> silent = ask_in_call(lock, {});
    std::uint64_t moves = count_moves(here);
    if (!silent.empty()) {  // that took long enough to see whether anything moves
        last_moves_ = moves;
        silent = ask_in_call(lock, silent);
        moves = count_moves(moves_here());
    }
    if (find_error(own_status_.sequence) != nullptr) {
        return {StatusCode::group_error};
    }
    if (std::vector<int> barred = find_barred(silent); !barred.empty()) {
        return give_up(std::move(barred), true);
    }
    if (moves == last_moves_) {
        std::vector<int> held_up_by = find_missing();
        if (held_up_by.empty()) {
            held_up_by = silent;
        }
        return give_up(std::move(held_up_by), false);
    }
    last_moves_ = moves;
    options.deadline_ns = next_expiry_ns_ = core::now_ns() + core::stall_ns;
    return {};
}

}  // namespace ferrodist::net
