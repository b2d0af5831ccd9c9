// SPDX-License-Identifier: MIT OR Apache-2.0
// Script: the bytes of a fuzzer, read as decisions. Its end reads as zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace ferrodist::fuzz {

using Buffer = std::vector<std::byte>;

class Script {
public:
    explicit Script(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    bool is_at_end() const { return at_ >= bytes_.size(); }
    std::uint8_t byte() { return is_at_end() ? 0 : bytes_[at_++]; }
    std::size_t below(std::size_t limit) { return byte() % limit; }
    // True once in so many times.
    bool one_in(std::size_t times) { return below(times) == times - 1; }

    // Mostly a small number, so that those of different frames meet; now and then one at a limit.
    std::uint64_t number() {
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        constexpr std::uint64_t limits[] = {most, most - 1, most / 2, most / 2 + 1, 0x7fffffff, 0x80000000, 0xffffffff};
        if (!one_in(8)) {
            return below(6);
        }
        return limits[below(std::size(limits))] - below(2);
    }

    // The size of something: nothing, little, or about what some limit is.
    std::size_t size() {
        constexpr std::size_t limits[] = {40, 72, 128, 1024, 4096, 8192, 65536};
        return one_in(3) ? limits[below(std::size(limits))] + below(3) - 1 : below(32);
    }

    Buffer bytes(std::size_t count) {
        Buffer found(count);
        for (std::byte& one : found) {
            one = static_cast<std::byte>(is_at_end() ? found.size() : byte());
        }
        return found;
    }

private:
    std::span<const std::uint8_t> bytes_;
    std::size_t at_ = 0;
};

}  // namespace ferrodist::fuzz
