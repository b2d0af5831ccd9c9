// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/frame.hpp"

#include <cstring>

namespace ferrodist::net {
namespace {

constexpr std::uint32_t magic = 0x54534446;  // "FDST"
constexpr std::uint64_t longest_eager = 64 * 1024 + 1024;
constexpr std::uint64_t longest_text = 64 * 1024;
constexpr std::uint64_t longest_descriptor = 16 * 1024 * 1024;
constexpr std::uint64_t longest_members = 4 * 65536 + 16;

struct Wire {
    std::uint32_t magic;
    std::uint8_t version;
    std::uint8_t kind;
    std::uint16_t epoch;
    std::uint32_t source;
    std::uint32_t tag;
    std::uint64_t group, sequence, fingerprint, number, length, digest, seal;
};
static_assert(sizeof(Wire) == header_nbytes);
constexpr std::size_t sealed_nbytes = header_nbytes - 8;

Bytes sealed_part(const std::byte* bytes) { return {bytes, sealed_nbytes}; }

}  // namespace

std::uint64_t longest_payload(FrameKind kind, std::uint64_t piece) {
    switch (kind) {
        case FrameKind::data:
        case FrameKind::bulk:
            return piece;
        case FrameKind::eager:
            return longest_eager;
        case FrameKind::rts:
        case FrameKind::left:
        case FrameKind::propose:
        case FrameKind::group_error:
            return longest_text;
        case FrameKind::differ:
        case FrameKind::descriptor:
            return longest_descriptor;
        case FrameKind::join:
        case FrameKind::ring:
        case FrameKind::bar:
            return longest_members;
        case FrameKind::rank_status:
            return 2 * longest_members + longest_text;
        default:
            return 0;
    }
}

HeaderBytes encode(const Header& header, const FrameKey& key) {
    Wire wire{magic, wire_version, static_cast<std::uint8_t>(header.kind), header.epoch, header.source,
              header.tag, header.group, header.sequence, header.fingerprint, header.number,
              header.length, header.digest, 0};
    HeaderBytes bytes;
    std::memcpy(bytes.data(), &wire, header_nbytes);
    wire.seal = key.sign(sealed_part(bytes.data()));
    std::memcpy(bytes.data() + sealed_nbytes, &wire.seal, sizeof wire.seal);
    return bytes;
}

std::variant<Header, Flaw> decode(const std::byte* bytes, const FrameKey& key, std::uint32_t source,
                                  std::uint64_t number, std::uint64_t piece) {
    Wire wire;
    std::memcpy(&wire, bytes, header_nbytes);
    if (wire.magic != magic) {
        return Flaw("they do not begin as a frame does");
    }
    if (wire.seal != key.sign(sealed_part(bytes))) {
        return Flaw("the seal does not fit the header");
    }
    if (wire.version != wire_version || wire.epoch != 0) {
        return Flaw("a version of the wire that this one does not speak");
    }
    if (wire.source != source || wire.number != number) {
        return Flaw("the header does not fit the link");
    }
    if (wire.kind > static_cast<std::uint8_t>(FrameKind::last)) {
        return Flaw("an unknown kind of frame");
    }
    const auto kind = static_cast<FrameKind>(wire.kind);
    if (wire.length > longest_payload(kind, piece)) {
        return Flaw("the payload is longer than a frame of its kind may have");
    }
    return Header{kind, wire.source, wire.tag, wire.group, wire.sequence, wire.fingerprint,
                  wire.number, wire.length, wire.digest, wire.epoch};
}

}  // namespace ferrodist::net
