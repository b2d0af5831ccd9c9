// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/memory.hpp"

#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace ferrodist::net {
namespace {

// Blocks of one size that were given back. Each begins with its size, before what its user sees.
class Recycling {
public:
    std::byte* take(std::size_t nbytes) {
        if (nbytes > small && nbytes <= large) {
            const std::unique_lock guard(mutex_, std::try_to_lock);
            if (guard && !kept_.empty()) {
                std::byte* block = kept_.back();
                kept_.pop_back();
                return block + before;
            }
        }
        const std::size_t size = nbytes > small && nbytes <= large ? large : nbytes;
        auto* block = static_cast<std::byte*>(::operator new(before + size));
        std::memcpy(block, &size, sizeof size);
        return block + before;
    }

    void give_back(std::byte* memory) noexcept {
        std::byte* block = memory - before;
        std::size_t size;
        std::memcpy(&size, block, sizeof size);
        if (size == large) {
            const std::unique_lock guard(mutex_, std::try_to_lock);
            if (guard && kept_.size() < most) {
                kept_.push_back(block);
                return;
            }
        }
        ::operator delete(block);
    }

private:
    // Only ever tried: in a forked child it stays locked if a thread of the parent had it.
    static constexpr std::size_t before = 64, small = 32 * 1024, large = 512 * 1024, most = 32;
    std::mutex mutex_;
    std::vector<std::byte*> kept_ = [] {
        std::vector<std::byte*> none;
        none.reserve(most);
        return none;
    }();
};

Recycling& recycling() {
    static auto* const one = new Recycling;  // outlives every block
    return *one;
}

}  // namespace

void Recycle::operator()(std::byte* memory) const noexcept { recycling().give_back(memory); }

Memory new_memory(std::size_t nbytes) { return Memory(recycling().take(nbytes)); }

}  // namespace ferrodist::net
