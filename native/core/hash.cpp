// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/hash.hpp"

#include <cstddef>

namespace ferrodist {
namespace {

// Up to eight bytes as a little-endian number, whatever the machine's own order is.
std::uint64_t read_word(std::string_view bytes) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        word |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return word;
}

}  // namespace

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
