// SPDX-License-Identifier: MIT OR Apache-2.0
// Split: how some ranks of a group come to be a group of their own, without a call of the others.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shm/group.hpp"

namespace ferrodist::shm {

// Every member shows an invitation in its own arena; the first one's says where the group's block
// is. A member that sees all invitations maps the block and meets the others in it.
class Split : core::NonCopyable {
public:
    // `members` are ranks of `parent`; `id` is the same on all of them and nowhere else in use.
    Split(std::shared_ptr<Group> parent, std::vector<int> members, std::uint64_t id);
    ~Split();

    // Waits for all members. A failed rank is a rank of the parent.
    Status wait(const WaitOptions& options);
    // The members, as ranks of the parent, whose invitation is not there.
    std::vector<int> absent() const;
    // The new group, once wait() went well.
    std::shared_ptr<Group> group() const { return group_; }

private:
    class WaitPoll;

    bool is_anybody_joining() const;
    std::vector<int> world_ranks() const;
    int rank() const;  // of this process in the new group
    bool has_come(int member) const;
    Status await(int member, const WaitOptions& options);

    std::shared_ptr<Group> parent_;
    std::vector<int> members_;
    std::uint64_t id_;
    std::size_t block_ = 0;
    bool is_first_;
    Invitation* invitation_ = nullptr;
    std::shared_ptr<Group> group_;
};

}  // namespace ferrodist::shm
