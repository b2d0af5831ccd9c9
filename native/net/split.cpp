// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/split.hpp"

#include <algorithm>

#include "net/waiter.hpp"

namespace ferrodist::net {

Split::Split(std::shared_ptr<Group> parent, std::vector<int> members, std::uint64_t identity)
    : parent_(std::move(parent)), members_(std::move(members)), identity_(identity) {
    Mesh& mesh = parent_->mesh();
    std::vector<int> world_ranks;
    for (const int member : members_) {
        world_ranks.push_back(parent_->world_rank(member));
    }
    const Lock guard = mesh.lock();
    Invitation& invitation = mesh.invitations()[identity_];
    if (invitation.members != world_ranks) {  // a list that others were told counts for nothing
        invitation = {world_ranks, std::vector<bool>(world_ranks.size(), false)};
    }
    group_ = std::make_shared<Group>(parent_->shared_mesh(), identity_, world_ranks, parent_);
    invitation.has_joined[static_cast<std::size_t>(group_->rank())] = true;
    tell(FrameKind::join);
}

Split::~Split() {
    if (parent_->mesh().is_of_ancestor()) {
        return;
    }
    const Lock guard = parent_->mesh().lock();
    if (!is_over_) {
        tell(FrameKind::unjoin);
    }
    parent_->mesh().invitations().erase(identity_);
}

// Those that have the group get the error before they see that this rank is not in it; those that come later do not get
// the group at all.
void Split::give_up(std::string_view text) {
    group_->give_up_split(text);
    const Lock guard = parent_->mesh().lock();
    is_over_ = true;
    tell(FrameKind::unjoin);
}

// All of the parent hear it: who misses a member can then say where that one waits.
void Split::tell(FrameKind kind) {
    const std::vector<int>& members = group_->members();
    const Bytes list = kind == FrameKind::join ? std::as_bytes(std::span(members)) : Bytes{};
    for (const int world_rank : parent_->members()) {
        if (world_rank != parent_->mesh().rank()) {
            parent_->mesh().send(world_rank, {.kind = kind, .group = identity_}, list);
        }
    }
}

std::vector<int> Split::absent_now() const {
    const Invitation& invitation = parent_->mesh().invitations()[identity_];
    std::vector<int> ranks;
    for (std::size_t i = 0; i < members_.size(); ++i) {
        if (!invitation.has_joined[i]) {
            ranks.push_back(members_[i]);
        }
    }
    return ranks;
}

std::vector<int> Split::absent() {
    const Lock guard = parent_->mesh().lock();
    return absent_now();
}

// Whether none of those who are missing is stuck in another call.
bool Split::may_still_come(const std::vector<int>& absent, const WaitOptions& options) const {
    return std::all_of(absent.begin(), absent.end(), [&](int rank) {
        return parent_->mesh().held_ns(parent_->world_rank(rank)) < options.patience.stuck_ns;
    });
}

Status Split::wait(const WaitOptions& options) {
    Mesh& mesh = parent_->mesh();
    Lock guard = mesh.lock();
    Waiter waiter(mesh, guard, options);
    while (true) {
        if (group_->find_error(1) != nullptr) {  // of the parent, or of a member that has given up
            return {StatusCode::group_error};
        }
        for (const int rank : members_) {
            // A member that has come and died ends it: others may miss it. One that has left had come to its end.
            if (!mesh.is_up(parent_->world_rank(rank)) && !parent_->has_left(rank)) {
                return parent_->loss(rank);
            }
        }
        const std::vector<int> absent = absent_now();
        if (absent.empty()) {
            is_over_ = true;
            return {};
        }
        const bool looks = waiter.is_time_to_poll();
        for (const int rank : absent) {
            if (parent_->sends_no_more(rank)) {
                return parent_->loss(rank);
            }
            if (looks && mesh.lacks_heartbeat(parent_->world_rank(rank))) {
                return {StatusCode::no_heartbeat, rank};
            }
        }
        const Status status = waiter.until_change(mesh.epoch());
        if (status.code == StatusCode::late && options.is_patient() && may_still_come(absent, options)) {
            options.deadline_ns = core::now_ns() + core::patient_look_ns;
        } else if (status.failed()) {
            return status;
        }
    }
}

}  // namespace ferrodist::net
