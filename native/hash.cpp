// SPDX-License-Identifier: MIT OR Apache-2.0
#include "hash.hpp"

#include <bit>
#include <cstddef>

namespace ferrodist {
namespace {

// Odd numbers without structure: the golden ratio and digits of pi.
constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;
constexpr std::uint64_t not_negative_salt = 0x13198A2E03707344;
constexpr std::uint64_t negative_salt = 0xA4093822299F31D1;

// A bijection in which every bit of the input moves about half of the output (splitmix64).
constexpr std::uint64_t scramble(std::uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    return bits ^ (bits >> 31);
}

// Up to eight bytes as a little-endian number, whatever the machine's own order is.
std::uint64_t read_word(std::string_view bytes) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        word |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return word;
}

}  // namespace

void Fingerprint::mix(std::uint64_t number, std::uint64_t salt) {
    // Rotation and multiplication between steps make the order of the numbers matter.
    state_ = std::rotl(state_ ^ scramble(number + salt), 27) * golden + salt;
    ++length_;
}

void Fingerprint::add(std::uint64_t number) { mix(number, not_negative_salt); }

void Fingerprint::add(std::int64_t number) {
    mix(static_cast<std::uint64_t>(number), number < 0 ? negative_salt : not_negative_salt);
}

std::uint64_t Fingerprint::value() const { return scramble(state_ ^ scramble(length_ + golden)); }

std::uint64_t hash_text(std::string_view text) {
    Fingerprint fingerprint;
    // The length comes first: "a" and "a\0" fill the same word.
    fingerprint.add(std::uint64_t{text.size()});
    for (std::size_t start = 0; start < text.size(); start += 8) {
        fingerprint.add(read_word(text.substr(start, 8)));
    }
    return fingerprint.value();
}

}  // namespace ferrodist
