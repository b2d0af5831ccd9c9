// SPDX-License-Identifier: MIT OR Apache-2.0
// What becomes of a call that cannot succeed: group errors, and what ranks say when they differ.
#include <algorithm>

#include "net/group.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {
namespace {

constexpr std::int64_t group_error_wait_ns = 1'000'000'000;

}  // namespace

// -- group errors -------------------------------------------------------------------------------------

const Group::GroupError* Group::find_error(std::uint64_t sequence) const {
    for (const GroupError& group_error : errors_) {
        if (group_error.sequence <= sequence) {
            return &group_error;
        }
    }
    return parent_ == nullptr ? nullptr : parent_->find_error(0);
}

std::optional<std::string> Group::group_error(std::uint64_t sequence) {
    const Lock guard = mesh_->lock();
    const GroupError* found = find_error(sequence);
    return found == nullptr ? std::nullopt : std::optional(found->text);
}

bool Group::set_error(std::uint64_t sequence, std::string_view text) {
    Lock guard = mesh_->lock();
    const WaitOptions options = brief(group_error_wait_ns);
    Waiter waiter(*mesh_, guard, options);
    for (int asked = -1; find_error(sequence) == nullptr;) {
        const int judge = coordinator();
        if (judge == rank_) {
            on_propose(sequence, bytes_of(text));
            return true;
        }
        if (judge != asked) {
            asked = judge;
            send(judge, {.kind = FrameKind::propose, .sequence = sequence}, bytes_of(text), true);
        }
        if (waiter.until_change(mesh_->epoch()).failed()) {  // it does not answer: this rank's own, then
            errors_.push_back({sequence, std::string(text)});
        }
    }
    return true;
}

void Group::give_up_split(std::string_view text) {
    const Lock guard = mesh_->lock();
    if (errors_.empty()) {
        errors_.push_back({1, std::string(text)});
        send_to_all({.kind = FrameKind::group_error, .sequence = 1}, bytes_of(text), true);
    }
}

std::optional<std::string> Group::own_error() {
    const Lock guard = mesh_->lock();
    return errors_.empty() ? std::nullopt : std::optional(errors_.front().text);
}

int Group::coordinator() const {
    int rank = 0;
    while (rank != rank_ && (is_gone(rank) || mesh_->lacks_heartbeat(world_rank(rank)))) {
        ++rank;
    }
    return rank;
}

void Group::on_propose(std::uint64_t sequence, Bytes text) {
    const bool is_needed = std::all_of(errors_.begin(), errors_.end(), [&](const GroupError& given) {
        return given.sequence > sequence;
    });
    if (is_needed) {
        errors_.push_back({sequence, text_of(text)});
        mesh_->check_requests();
        send_to_all({.kind = FrameKind::group_error, .sequence = sequence}, text, true);
    }
}

// -- differences ----------------------------------------------------------------------------------

Status Group::exchange_descriptors(std::uint64_t sequence, Bytes descriptor, const WaitOptions& options,
                       std::vector<std::string>& descriptors) {
    Lock guard = mesh_->lock();
    Waiter waiter(*mesh_, guard, options);
    const int judge = coordinator();
    if (judge == rank_) {
        Payload copy{new_memory(descriptor.size()), descriptor.size()};
        std::copy(descriptor.begin(), descriptor.end(), copy.memory.get());
        on_differ(rank_, sequence, std::move(copy));
    } else {
        send(judge, {.kind = FrameKind::differ, .sequence = sequence}, descriptor, true);
    }
    while (true) {
        const auto& heard = heard_descriptors_;
        const bool is_whole = heard_ == sequence && std::all_of(heard.begin(), heard.end(), [](const auto& one) {
            return one.has_value();
        });
        if (is_whole) {
            for (const auto& one : heard) {
                descriptors.push_back(*one);
            }
            return {};
        }
        if (find_error(sequence) != nullptr) {
            return {StatusCode::group_error};
        }
        for (int rank = 0; rank < size(); ++rank) {
            const bool has_stated = stated_ == sequence && descriptors_[static_cast<std::size_t>(rank)].has_value();
            const bool is_needed = judge == rank_ ? !has_stated : rank == judge;
            if (rank != rank_ && is_needed && is_gone(rank)) {
                return loss(rank);
            }
        }
        if (waiter.is_time_to_poll()) {
            if (const Status status = slow_trouble(); status.failed()) {
                return status;
            }
        }
        Status status = waiter.until_change(mesh_->epoch());
        if (status.code == StatusCode::late) {
            status = expire(guard, options);
        }
        if (status.failed()) {
            return status;
        }
    }
}

// On the coordinator: ranks that wait in one call and differ in it may wait for ever, each for others.
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
        stated_ = sequence;
        note_difference(sequence);
        descriptors_.assign(members_.size(), std::nullopt);
        send_to_all({.kind = FrameKind::ask, .sequence = sequence}, {}, true);
    }
}

// On the coordinator: collects what all have called, and hands it to all.
void Group::on_differ(int rank, std::uint64_t sequence, Payload payload) {
    if (sequence == 0 || sequence < stated_ || heard_ == sequence) {
        return;
    }
    ask_all(sequence);
    descriptors_[static_cast<std::size_t>(rank)] = text_of(payload.bytes());
    if (std::any_of(descriptors_.begin(), descriptors_.end(), [](const auto& one) { return !one; })) {
        return;
    }
    for (std::size_t from = 0; from < descriptors_.size(); ++from) {
        const Header header{.kind = FrameKind::descriptor, .tag = static_cast<std::uint32_t>(from),
                            .sequence = sequence};
        send_to_all(header, bytes_of(*descriptors_[from]), true);
        on_descriptor(header, bytes_of(*descriptors_[from]));
    }
}

void Group::on_descriptor(const Header& header, Bytes text) {
    if (header.sequence == 0 || header.tag >= members_.size()) {
        return;
    }
    if (header.sequence != heard_) {
        heard_ = header.sequence;
        heard_descriptors_.assign(members_.size(), std::nullopt);
    }
    heard_descriptors_[header.tag] = text_of(text);
}

}  // namespace ferrodist::net
