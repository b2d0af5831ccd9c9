// SPDX-License-Identifier: MIT OR Apache-2.0
// 64-bit hashes ranks compare with each other: the same on every machine, not cryptographic.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ferrodist {

// Hashes a sequence of numbers one at a time. Order, length and sign matter.
class Fingerprint {
public:
    constexpr void add(std::uint64_t number) { mix(number, not_negative_salt); }
    // Negative numbers come apart from the unsigned ones that share their bits.
    constexpr void add(std::int64_t number) {
        mix(static_cast<std::uint64_t>(number), number < 0 ? negative_salt : not_negative_salt);
    }
    constexpr std::uint64_t value() const { return scramble(state_ ^ scramble(length_ + golden)); }

private:
    // Odd numbers without structure: the golden ratio and digits of pi.
    static constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;
    static constexpr std::uint64_t not_negative_salt = 0x13198A2E03707344;
    static constexpr std::uint64_t negative_salt = 0xA4093822299F31D1;

    // A bijection in which every bit of the input moves about half of the output (splitmix64).
    static constexpr std::uint64_t scramble(std::uint64_t bits) {
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
        return bits ^ (bits >> 31);
    }

    constexpr void mix(std::uint64_t number, std::uint64_t salt) {
        // Rotation and multiplication between steps make the order of the numbers matter.
        state_ = std::rotl(state_ ^ scramble(number + salt), 27) * golden + salt;
        ++length_;
    }

    std::uint64_t state_ = 0x243F6A8885A308D3;  // digits of pi: no structure of ours
    std::uint64_t length_ = 0;
};

// Hashes text by its UTF-8 bytes, in words of eight, little-endian whatever the machine's own order is.
inline std::uint64_t hash_text(std::string_view text) {
    Fingerprint fingerprint;
    // The length comes first: "a" and "a\0" fill the same word.
    fingerprint.add(std::uint64_t{text.size()});
    for (std::size_t start = 0; start < text.size(); start += 8) {
        std::uint64_t word = 0;
        for (std::size_t i = start; i < std::min(start + 8, text.size()); ++i) {
            word |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * (i - start));
        }
        fingerprint.add(word);
    }
    return fingerprint.value();
}

}  // namespace ferrodist
