// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/process.hpp"

namespace ferrodist {
namespace {

constexpr std::size_t unit = std::size_t{2} << 20;  // a huge page, where there are some

class Pool {
public:
    void* take(std::size_t nbytes) {
        const std::size_t size = (nbytes + unit - 1) / unit * unit;
        const std::lock_guard lock(mutex_);
        const auto fits = [&](const Block& block) { return block.size >= size && block.size <= size + size / 4; };
        if (const auto found = std::find_if(kept_.begin(), kept_.end(), fits); found != kept_.end()) {
            const Block block = *found;
            kept_.erase(found);
            kept_nbytes_ -= block.size;
            sizes_.emplace(block.address, block.size);
            return block.address;
        }
        return map(size);
    }

    void give(void* address) {
        const std::lock_guard lock(mutex_);
        const std::size_t size = sizes_.extract(address).mapped();
        if (size > most_warm) {
            munmap(address, size);
            return;
        }
        kept_.push_back({address, size});
        kept_nbytes_ += size;
        while (kept_nbytes_ > most_warm) {  // the one that was unused for longest goes
            munmap(kept_.front().address, kept_.front().size);
            kept_nbytes_ -= kept_.front().size;
            kept_.pop_front();
        }
    }

    std::size_t kept_nbytes() {
        const std::lock_guard lock(mutex_);
        return kept_nbytes_;
    }

private:
    struct Block {
        void* address;
        std::size_t size;
    };

    void* map(std::size_t size) {
        void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (address == MAP_FAILED) {
            throw std::bad_alloc();
        }
        madvise(address, size, MADV_HUGEPAGE);
        sizes_.emplace(address, size);
        return address;
    }

    std::mutex mutex_;
    std::deque<Block> kept_;
    std::size_t kept_nbytes_ = 0;
    std::unordered_map<void*, std::size_t> sizes_;  // of blocks in use
};

// Never destroyed: arrays may be given back while the program ends.
Pool& pool() {
    static auto* const only = new Pool;
    return *only;
}

// In a forked child another thread of the parent may hold the pool's lock for ever.
bool is_usable() {
    static const core::Birth birth;
    return !birth.is_of_ancestor();
}

}  // namespace

void* take_warm(std::size_t nbytes) {
    try {
        return is_usable() ? pool().take(nbytes) : ::operator new(nbytes);
    } catch (const std::bad_alloc&) {
        throw core::OutOfMemory(nbytes);
    }
}

void release_warm(void* block) noexcept {
    if (is_usable()) {
        pool().give(block);
    }  // else: gone with the child
}

std::size_t warm_nbytes() { return pool().kept_nbytes(); }

namespace core {
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

}  // namespace core
}  // namespace ferrodist
