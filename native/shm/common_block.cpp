// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/common_block.hpp"

#include <stdexcept>

namespace ferrodist::shm {
namespace {

std::size_t words_nbytes(const Group& group) {
    return (group.members().size() * sizeof(Word) + line - 1) / line * line;
}

}  // namespace

std::uint64_t CommonBlock::allocate(const Group& group, std::size_t nbytes) {
    World& world = group.world();
    world.sweep();  // what was dropped since may be just what is needed
    return world.arena().allocate(words_nbytes(group) + nbytes, true);  // zeroed: all members are inside
}

CommonBlock::CommonBlock(const Group& group, int owner, std::uint64_t offset, std::size_t nbytes)
    : world_(group.shared_world()), members_(group.members()), rank_(static_cast<std::size_t>(group.rank())),
      is_owner_(owner == group.rank()), offset_(offset) {
    const Peer& peer = group.peer(owner);
    std::byte* const block = peer.at(offset, words_nbytes(group) + nbytes);
    if (block == nullptr) {
        throw std::runtime_error("a shared block does not lie in the memory of its owner");
    }
    memory_ = is_owner_ ? std::static_pointer_cast<const void>(group.world().shared_arena()) : peer.mapping;
    presences_ = reinterpret_cast<Word*>(block);
    data_ = block + words_nbytes(group);
}

CommonBlock::~CommonBlock() {
    if (presences_ == nullptr || birth_.is_of_ancestor()) {
        return;
    }
    const std::shared_ptr<World> world = world_.lock();
    if (!is_owner_ || world == nullptr) {
        // Pairs with the acquire in World::is_needed: this process touches the block no more. An owner that is out of
        // its job leaves the memory to those who have it mapped.
        presences_[rank_].store(Presence::left, std::memory_order_release);
        return;
    }
    World::Remains remains{{}, members_, rank_, {offset_}, false};
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
        remains.presences.push_back(&presences_[rank]);
    }
    world->leave_behind(std::move(remains));
}

}  // namespace ferrodist::shm
