// SPDX-License-Identifier: MIT OR Apache-2.0
// CommonBlock: memory in the arena of one member of a group that all its members read and write.
//
// It begins with one word per member, which says whether that member still has it. Its owner frees it when all
// have dropped it or are dead, however the owner itself came to drop it: see World::Remains.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shm/group.hpp"

namespace ferrodist::shm {

class CommonBlock : core::NonCopyable {
public:
    // Takes zeroed memory in the arena of this process; returns its offset, which the other members open it by.
    static std::uint64_t allocate(const Group& group, std::size_t nbytes);

    // `owner` is a rank of the group. Throws std::runtime_error if there is no such block in its arena.
    CommonBlock(const Group& group, int owner, std::uint64_t offset, std::size_t nbytes);
    // Drops it: of what the others do with it nothing changes. A forked child's copy does nothing.
    ~CommonBlock();

    std::byte* data() const { return data_; }

private:
    Birth birth_;
    std::weak_ptr<World> world_;          // a block does not keep a process in its job
    std::shared_ptr<const void> memory_;  // what keeps the owner's arena mapped
    std::vector<int> members_;
    std::size_t rank_;
    bool is_owner_;
    std::uint64_t offset_;
    Word* presences_ = nullptr;
    std::byte* data_ = nullptr;
};

}  // namespace ferrodist::shm
