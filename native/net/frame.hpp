// SPDX-License-Identifier: MIT OR Apache-2.0
// The wire: what a frame looks like as bytes. No other file knows.
//
// A frame is a header of 72 bytes and a payload. All numbers are little-endian:
//
//     u32 magic   u8 version   u8 kind   u16 cpu   u32 source   u32 tag
//     u64 group   u64 sequence   u64 fingerprint   u64 number   u64 length   u64 digest   u64 seal
//
// `number` counts the frames of one direction of one link from 1: none can be left out, repeated or
// moved. `digest` is a keyed hash of the payload, `seal` one of all of the header before it. So a
// header is believed, and its length, before anything is set aside for the payload. `cpu` is the number + 1 of
// the CPU that its sender ran on: a hint for the waits of ranks on its host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

namespace ferrodist::net {

using Bytes = std::span<const std::byte>;

inline Bytes bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::string text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// -- keyed 64-bit hashes: SipHash-2-4 for headers, and a fast one for payloads, block by block ------

// SipHash-2-4 (Aumasson, Bernstein 2012): who does not know the key cannot make the hash of a
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

// -- frames ---------------------------------------------------------------------------------------

constexpr std::size_t header_nbytes = 72;
constexpr std::uint8_t wire_version = 6;

enum class FrameKind : std::uint8_t {
    heartbeat,   // I am alive: a thread of mine has been held in one call for so many ns: sequence
    data,        // a piece of a collective
    credit,      // I have consumed so many bytes of this group's pieces: sequence
    eager,       // a whole message: payload is its header and its content, fingerprint the size of that
    rts,         // a large message: sequence is its number, fingerprint its size, payload its header
    cts,         // send it
    bulk,        // a part of it
    taken,       // I do not want it: your memory may change. Not so if fingerprint is not 0: I had no memory for it,
                 // or, if sequence is 0, for an eager message
    withdraw,    // forget it
    abandoned,   // there is nothing more of it to come
    join,        // I want to be in this group: payload lists its members
    unjoin,      // no longer
    closing,     // no new calls from me: sequence counts my receives in flight
    left,        // nothing more from me in this group after call sequence, and why
    propose,     // to the group's coordinator: this group error is due
    group_error, // from there: this is the group error
    differ,      // to the group's coordinator: ranks differ in this call, and this is mine
    ask,         // from there: tell me your call
    descriptor,  // from there: the call of the rank in tag
    poll,        // what are you doing in this group?
    rank_status, // this
    ring,        // we wait for each other in a cycle of sends
    report,      // to the group's coordinator: I wait in this call
    received,    // so many bytes of your eager messages were received: sequence
    bar,         // are you in call fingerprint? else stay out of it, and refuse pieces of the ranks listed;
                 // answered by rank_status
    last = bar,
};

struct Header {
    FrameKind kind{};
    std::uint32_t source = 0;
    std::uint32_t tag = 0;
    std::uint64_t group = 0;
    std::uint64_t sequence = 0;
    std::uint64_t fingerprint = 0;
    std::uint64_t number = 0;
    std::uint64_t length = 0;
    std::uint64_t digest = 0;
    std::uint16_t cpu = 0;
};

using HeaderBytes = std::array<std::byte, header_nbytes>;

// The longest payload a frame of this kind may have; `piece` is that of a piece.
std::uint64_t longest_payload(FrameKind kind, std::uint64_t piece);

// Lays a header out and seals it.
HeaderBytes encode(const Header& header, const FrameKey& key);

// Why bytes are no header.
using Flaw = std::string_view;

// Reads a header back; everything in it is as it must be for this link at this moment, or it is a Flaw.
std::variant<Header, Flaw> decode(const std::byte* bytes, const FrameKey& key, std::uint32_t source,
                                  std::uint64_t number, std::uint64_t piece);

}  // namespace ferrodist::net
