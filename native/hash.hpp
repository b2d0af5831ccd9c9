// SPDX-License-Identifier: MIT OR Apache-2.0
// 64-bit hashes ranks compare with each other: the same on every machine, not cryptographic.
#pragma once

#include <cstdint>
#include <string_view>

namespace ferrodist {

// Hashes a sequence of numbers one at a time. Order, length and sign matter.
class Fingerprint {
public:
    void add(std::uint64_t number);
    // Negative numbers come apart from the unsigned ones that share their bits.
    void add(std::int64_t number);
    std::uint64_t value() const;

private:
    void mix(std::uint64_t number, std::uint64_t salt);

    std::uint64_t state_ = 0x243F6A8885A308D3;  // digits of pi: no structure of ours
    std::uint64_t length_ = 0;
};

// Hashes text by its UTF-8 bytes.
std::uint64_t hash_text(std::string_view text);

}  // namespace ferrodist
