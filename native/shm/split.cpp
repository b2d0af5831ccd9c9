// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/split.hpp"

#include <algorithm>

namespace ferrodist::shm {

Split::Split(std::shared_ptr<Group> parent, std::vector<int> members, std::uint64_t id)
    : parent_(std::move(parent)), members_(std::move(members)), id_(id),
      is_first_(members_.front() == parent_->rank()) {
    World& world = parent_->world();
    world.sweep();
    if (is_first_) {
        block_ = world.arena().allocate(GroupLayout::nbytes(members_.size()));
    }
    try {
        invitation_ = world.invite(id_, block_, world_ranks());
    } catch (...) {
        if (is_first_) {
            world.arena().free(block_);
        }
        throw;
    }
}

Split::~Split() {
    World& world = parent_->world();
    if (world.is_of_ancestor()) {
        return;
    }
    world.withdraw(invitation_);
    if (is_first_ && group_ == nullptr && !is_anybody_joining()) {
        world.arena().free(block_);
    } else if (is_first_ && group_ == nullptr) {
        // Others may be in the block: it is freed when all have left it, as any group's.
        Group(parent_->shared_world(), world_ranks(), rank(), world.arena().base() + block_, block_, nullptr);
    }
}

// Who joins says so before it looks once more for the first member's invitation, and the first member
// withdraws that before it looks who joins: one of the two sees the other.
bool Split::is_anybody_joining() const {
    return std::any_of(members_.begin() + 1, members_.end(), [&](int member) {
        const Invitation* theirs = parent_->world().find_invitation(parent_->world_rank(member), id_);
        // Pairs with the store in wait.
        return theirs != nullptr && theirs->is_joining.load(std::memory_order_seq_cst) != 0;
    });
}

std::vector<int> Split::world_ranks() const {
    std::vector<int> ranks;
    for (const int member : members_) {
        ranks.push_back(parent_->world_rank(member));
    }
    return ranks;
}

int Split::rank() const {
    return static_cast<int>(std::find(members_.begin(), members_.end(), parent_->rank()) - members_.begin());
}

bool Split::has_come(int member) const {
    return parent_->world().find_invitation(parent_->world_rank(member), id_) != nullptr;
}

std::vector<int> Split::absent() const {
    std::vector<int> found;
    std::copy_if(members_.begin(), members_.end(), std::back_inserter(found),
                 [&](int member) { return !has_come(member); });
    return found;
}

class Split::WaitPoll {
public:
    WaitPoll(Split& split, const WaitOptions& options) : split_(split), options_(options) {}

    void begin() { options_.begin(); }
    Status check() const {
        if (split_.parent_->has_error(0)) {
            return {StatusCode::group_error};
        }
        for (const int member : split_.members_) {
            // Nobody has the group yet while this rank waits here: one that has come and died is lost, too.
            const bool is_dead = split_.parent_->world().is_dead(split_.parent_->world_rank(member));
            const bool is_out = is_dead || (split_.parent_->has_left(member) && !split_.has_come(member));
            if (is_out && member != split_.parent_->rank()) {
                return {StatusCode::lost, member};
            }
        }
        return {};
    }
    Status poll() const {
        if (const Status status = check(); status.failed()) {
            return status;
        }
        if (options_.is_late() && !(options_.is_patient() && may_still_come())) {
            return {StatusCode::late};
        }
        return {options_.hook->poll() ? StatusCode::done : StatusCode::interrupted};
    }

private:
    // Whether nobody of those who are missing is stuck in another call.
    bool may_still_come() const {
        const std::vector<int> absent = split_.absent();
        return std::all_of(absent.begin(), absent.end(), [&](int member) {
            return split_.parent_->peer(member).held_ns() < options_.patience.stuck_ns;
        });
    }

    Split& split_;
    const WaitOptions& options_;
};

Status Split::await(int member, const WaitOptions& options) {
    ArenaHeader& header = parent_->peer(member).header();
    WaitPoll wait_poll(*this, options);
    return wait_until(header.invitations_changed, header.sleepers, options,
                      [&] { return has_come(member); }, wait_poll);
}

Status Split::wait(const WaitOptions& options) {
    for (const int member : members_) {
        if (const Status status = await(member, options); status.failed()) {
            return status;
        }
    }
    World& world = parent_->world();
    const int first = parent_->world_rank(members_.front());
    invitation_->is_joining.store(1, std::memory_order_seq_cst);  // pairs with is_anybody_joining
    const Invitation* invitation = world.find_invitation(first, id_);
    // The first member gave up meanwhile: at its deadline, or it has aborted the parent before.
    const auto given_up = [&] { return Status{parent_->has_error(0) ? StatusCode::group_error : StatusCode::late}; };
    if (invitation == nullptr) {
        return given_up();
    }
    // Relaxed: written before the id that was just acquired; and the entry was not used again since.
    const std::uint64_t offset = invitation->block.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (invitation->id.load(std::memory_order_relaxed) != id_) {
        return given_up();
    }
    std::byte* block = world.peer(first).at(offset, GroupLayout::nbytes(members_.size()));
    if (block == nullptr) {
        return {StatusCode::corrupt, members_.front()};
    }
    group_ = std::make_shared<Group>(parent_->shared_world(), world_ranks(), rank(), block,
                                     is_first_ ? std::optional(block_) : std::nullopt, parent_);
    // When all have met in the block, nobody needs the invitations any more.
    Status status = group_->meet(options);
    if (status.code == StatusCode::group_error && group_->missing().empty()) {
        status = {};  // a member that has got the group has ended it already: the next call here says so
    }
    group_->next_round();
    return {status.code, status.failed_rank < 0 ? -1 : members_[static_cast<std::size_t>(status.failed_rank)]};
}

}  // namespace ferrodist::shm
