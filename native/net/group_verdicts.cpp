// SPDX-License-Identifier: MIT OR Apache-2.0
// What becomes of a call that cannot succeed: verdicts, and what ranks say when they differ.
#include <algorithm>

#include "net/group.hpp"
#include "net/questions.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {
namespace {

constexpr std::int64_t verdict_patience_ns = 1'000'000'000;

}  // namespace

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
    while (rank != rank_ && (is_gone(rank) || mesh_->is_silent(world_rank(rank)))) {
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
        mesh_->check_requests();
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
            const bool has_stated = stated_ == sequence && statements_[static_cast<std::size_t>(rank)].has_value();
            const bool is_needed = judge == rank_ ? !has_stated : rank == judge;
            if (rank != rank_ && is_needed && is_gone(rank)) {
                return loss(rank);
            }
        }
        if (waiter.is_time_to_look()) {
            if (const Ending ending = slow_trouble(); ending.failed()) {
                return ending;
            }
        }
        Ending ending = waiter.until_change(mesh_->tick());
        if (ending.outcome == Outcome::late) {
            ending = expire(guard, patience);
        }
        if (ending.failed()) {
            return ending;
        }
    }
}

// On the keeper: ranks that wait in one call and differ in it may wait for ever, each for others.
void Group::on_report(int rank, std::uint64_t sequence, std::uint64_t fingerprint) {
    if (sequence == 0) {
        return;  // no call has it
    }
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
    if (sequence == 0 || sequence < stated_ || heard_ == sequence) {
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
    if (header.sequence == 0 || header.tag >= members_.size()) {
        return;
    }
    if (header.sequence != heard_) {
        heard_ = header.sequence;
        heard_statements_.assign(members_.size(), std::nullopt);
    }
    heard_statements_[header.tag] = text_of(text);
}

}  // namespace ferrodist::net
