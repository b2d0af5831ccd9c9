// SPDX-License-Identifier: MIT OR Apache-2.0
// Split: some ranks of a group on their way to be a group of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "net/group.hpp"

namespace ferrodist::net {

class Split : core::NonCopyable {
public:
    // `members` are ranks of the parent, this one among them; `identity` is the same on all of them.
    Split(std::shared_ptr<Group> parent, std::vector<int> members, std::uint64_t identity);
    // Who has not come by now is told that nobody waits any more.
    ~Split();

    // Waits for all members; the failed rank of an ending is a rank of the parent.
    Status wait(const WaitOptions& options);
    // The members, as ranks of the parent, that have not come.
    std::vector<int> absent();
    // After a wait that failed: ends the group with this group error for members that have it already.
    void give_up(std::string_view text);
    // The group, when all members have come.
    std::shared_ptr<Group> group() const { return group_; }

private:
    std::vector<int> absent_now() const;
    bool may_still_come(const std::vector<int>& absent, const WaitOptions& options) const;
    void tell(FrameKind kind);

    std::shared_ptr<Group> parent_;
    std::vector<int> members_;
    std::uint64_t identity_;
    std::shared_ptr<Group> group_;
    bool is_over_ = false;  // all have come, or this rank has given up and the others were told
};

}  // namespace ferrodist::net
