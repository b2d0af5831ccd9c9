// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/warm_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>

#include "core/forks.hpp"
#include "core/out_of_memory.hpp"

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

}  // namespace ferrodist
