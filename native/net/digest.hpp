// SPDX-License-Identifier: MIT OR Apache-2.0
// Keyed 64-bit hashes: SipHash-2-4 for headers, and a fast one for payloads, block by block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferrodist::net {

using Bytes = std::span<const std::byte>;

// SipHash-2-4 (Aumasson, Bernstein 2012): whoever does not know the key cannot make the hash of a
// message, however many others' hashes they have seen.
std::uint64_t siphash(const std::array<std::uint64_t, 2>& key, Bytes message);

// The key of one direction of one connection.
class FrameKey {
public:
    static constexpr std::size_t session_nbytes = 32;
    static constexpr std::size_t block_nbytes = 1024;
    static constexpr std::size_t tiny_nbytes = 128;

    // `session` is what both ends have from their handshake; each rank signs with a key of its own.
    FrameKey(Bytes session, std::uint32_t source);

    // A tag over a header.
    std::uint64_t sign(Bytes header) const { return siphash(header_key_, header); }
    // A hash over a payload: SipHash of a tiny one. Of a larger one, blocks of 1 KB are each hashed to 64
    // bits by sums of products with secret numbers (the NH of UMAC), and SipHash goes over those.
    std::uint64_t digest(Bytes payload) const;

private:
    std::array<std::uint64_t, 2> header_key_, payload_key_;
    alignas(64) std::array<std::uint32_t, block_nbytes / 4> pads_;
};

}  // namespace ferrodist::net
