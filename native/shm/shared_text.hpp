// SPDX-License-Identifier: MIT OR Apache-2.0
// Text in shared memory that one process rewrites while others read it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace ferrodist::shm {

// A seqlock: the version is odd while the text changes, and a reader tries again if it moved.
template <std::size_t capacity>
class SharedText {
public:
    // Only one thread may write at a time. Longer text is cut.
    void write(std::string_view text) {
        const std::uint32_t version = version_.load(std::memory_order_relaxed);
        version_.store(version + 1, std::memory_order_relaxed);
        // Pairs with the acquire fence in read: no word is seen before the odd version.
        std::atomic_thread_fence(std::memory_order_release);
        const std::size_t nbytes = std::min(text.size(), capacity);
        nbytes_.store(static_cast<std::uint32_t>(nbytes), std::memory_order_relaxed);
        for (std::size_t at = 0; at < nbytes; at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, nbytes - at));
            words_[at / 8].store(word, std::memory_order_relaxed);
        }
        // Pairs with the first load in read.
        version_.store(version + 2, std::memory_order_release);
    }

    // Empty if the writer is in the middle, or died there.
    std::string read() const {
        for (int attempt = 0; attempt < 100; ++attempt) {
            // Pairs with the release in write.
            const std::uint32_t before = version_.load(std::memory_order_acquire);
            std::string text(std::min<std::size_t>(nbytes_.load(std::memory_order_relaxed), capacity), ' ');
            for (std::size_t at = 0; at < text.size(); at += 8) {
                const std::uint64_t word = words_[at / 8].load(std::memory_order_relaxed);
                std::memcpy(text.data() + at, &word, std::min<std::size_t>(8, text.size() - at));
            }
            // Pairs with the release fence in write.
            std::atomic_thread_fence(std::memory_order_acquire);
            if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) {
                return text;
            }
        }
        return {};
    }

private:
    std::atomic<std::uint32_t> version_{0};
    std::atomic<std::uint32_t> nbytes_{0};
    std::array<std::atomic<std::uint64_t>, capacity / 8> words_{};
};

}  // namespace ferrodist::shm
