// SPDX-License-Identifier: MIT OR Apache-2.0
// The header of a frame: it reads back, and nothing that was changed does, sealed again or not.
#include <cstring>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "check.hpp"
#include "net/frame.hpp"

namespace ferrodist::tests {
namespace {

using net::Flaw;
using net::FrameKey;
using net::FrameKind;
using net::Header;

constexpr std::uint32_t source = 5;
constexpr std::uint64_t number = 77, piece = 4096;
constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();

FrameKey key_of(std::uint32_t rank) {
    return FrameKey(std::vector<std::byte>(FrameKey::session_nbytes, std::byte{9}), rank);
}

Header sample() {
    return {.kind = FrameKind::data, .source = source, .tag = 1, .group = largest, .sequence = 2,
            .fingerprint = 3, .number = number, .length = piece, .digest = 4, .cpu = 6};
}

// What is wrong with bytes; empty if nothing is.
std::string flaw_of(const net::HeaderBytes& bytes, std::uint32_t from = source, std::uint64_t expected = number) {
    const auto found = net::decode(bytes.data(), key_of(source), from, expected, piece);
    const Flaw* flaw = std::get_if<Flaw>(&found);
    return flaw == nullptr ? "" : std::string(*flaw);
}

std::string flaw_of(const Header& header) { return flaw_of(net::encode(header, key_of(source))); }

bool speaks_of(const std::string& flaw, const char* words) { return flaw.find(words) != std::string::npos; }

}  // namespace

TEST(a_header_reads_back_as_it_was) {
    const auto found = net::decode(net::encode(sample(), key_of(source)).data(), key_of(source), source, number, piece);
    CHECK(std::holds_alternative<Header>(found));
    const Header header = std::get<Header>(found), expected = sample();
    CHECK(header.kind == expected.kind);
    CHECK_EQUAL(header.source, expected.source);
    CHECK_EQUAL(header.tag, expected.tag);
    CHECK_EQUAL(header.group, expected.group);
    CHECK_EQUAL(header.sequence, expected.sequence);
    CHECK_EQUAL(header.fingerprint, expected.fingerprint);
    CHECK_EQUAL(header.cpu, expected.cpu);
    CHECK_EQUAL(header.number, expected.number);
    CHECK_EQUAL(header.length, expected.length);
    CHECK_EQUAL(header.digest, expected.digest);
}

TEST(every_bit_of_a_header_is_under_its_seal) {
    const net::HeaderBytes bytes = net::encode(sample(), key_of(source));
    CHECK_EQUAL(flaw_of(bytes), "");
    for (std::size_t bit = 0; bit < 8 * net::header_nbytes; ++bit) {
        net::HeaderBytes changed = bytes;
        changed[bit / 8] ^= std::byte(1 << bit % 8);
        CHECK(speaks_of(flaw_of(changed), bit < 32 ? "begin as a frame" : "the seal"));
    }
}

TEST(a_header_of_another_link_or_number_is_refused_though_it_is_sealed) {
    const net::HeaderBytes bytes = net::encode(sample(), key_of(source));
    CHECK(speaks_of(flaw_of(bytes, source + 1), "the link"));
    CHECK(speaks_of(flaw_of(bytes, source, number + 1), "the link"));
    CHECK(speaks_of(flaw_of(bytes, source, number - 1), "the link"));
    const auto found = net::decode(bytes.data(), key_of(source + 1), source, number, piece);
    CHECK(std::holds_alternative<Flaw>(found));
}

TEST(what_a_header_may_not_say_is_refused_though_it_is_sealed) {
    net::HeaderBytes other = net::encode(sample(), key_of(source));
    constexpr std::size_t version_at = 4, seal_at = net::header_nbytes - 8;
    other[version_at] = std::byte{net::wire_version + 1};
    const std::uint64_t seal = key_of(source).sign(net::Bytes(other).first(seal_at));
    std::memcpy(other.data() + seal_at, &seal, sizeof seal);
    CHECK(speaks_of(flaw_of(other), "a version"));
    Header header = sample();
    header.source = source + 1;
    CHECK(speaks_of(flaw_of(header), "the link"));
    for (int kind = static_cast<int>(FrameKind::last) + 1; kind < 256; ++kind) {
        header = sample();
        header.kind = static_cast<FrameKind>(kind);
        CHECK(speaks_of(flaw_of(header), "unknown kind"));
    }
}

TEST(a_payload_is_never_longer_than_its_kind_allows) {
    for (int kind = 0; kind <= static_cast<int>(FrameKind::last); ++kind) {
        Header header = sample();
        header.kind = static_cast<FrameKind>(kind);
        const std::uint64_t longest = net::longest_payload(header.kind, piece);
        CHECK(longest <= 16 << 20);
        header.length = longest;
        CHECK_EQUAL(flaw_of(header), "");
        for (const std::uint64_t length : {longest + 1, std::uint64_t{1} << 40, std::uint64_t{1} << 63, largest,
                                           largest - net::header_nbytes + 1}) {
            header.length = length;
            CHECK(speaks_of(flaw_of(header), "longer than"));
        }
    }
    CHECK_EQUAL(net::longest_payload(FrameKind::data, piece), piece);
    CHECK_EQUAL(net::longest_payload(FrameKind::heartbeat, piece), 0u);
}

}  // namespace ferrodist::tests
