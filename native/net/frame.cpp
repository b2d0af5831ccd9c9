// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/frame.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ferrodist::net {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian, as all our machines are");

std::uint64_t load_word(const std::byte* from) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

class SipState {
public:
    explicit SipState(const std::array<std::uint64_t, 2>& key)
        : v0_(key[0] ^ 0x736f6d6570736575), v1_(key[1] ^ 0x646f72616e646f6d),
          v2_(key[0] ^ 0x6c7967656e657261), v3_(key[1] ^ 0x7465646279746573) {}

    void add(std::uint64_t word) {
        v3_ ^= word;
        round();
        round();
        v0_ ^= word;
    }

    // `last` holds the bytes that fill no word, and the length of the message in its highest byte.
    std::uint64_t finish(std::uint64_t last) {
        add(last);
        v2_ ^= 0xff;
        for (int i = 0; i < 4; ++i) {
            round();
        }
        return v0_ ^ v1_ ^ v2_ ^ v3_;
    }

private:
    void round() {
        v0_ += v1_;
        v1_ = std::rotl(v1_, 13) ^ v0_;
        v0_ = std::rotl(v0_, 32);
        v2_ += v3_;
        v3_ = std::rotl(v3_, 16) ^ v2_;
        v0_ += v3_;
        v3_ = std::rotl(v3_, 21) ^ v0_;
        v2_ += v1_;
        v1_ = std::rotl(v1_, 17) ^ v2_;
        v2_ = std::rotl(v2_, 32);
    }

    std::uint64_t v0_, v1_, v2_, v3_;
};

using BlockHash = std::uint64_t (*)(const std::byte* block, const std::uint32_t* pads);

std::uint64_t hash_block(const std::byte* block, const std::uint32_t* pads) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < FrameKey::block_nbytes / 8; ++i) {
        const std::uint64_t word = load_word(block + 8 * i);
        const std::uint32_t low = static_cast<std::uint32_t>(word) + pads[2 * i];
        const std::uint32_t high = static_cast<std::uint32_t>(word >> 32) + pads[2 * i + 1];
        sum += std::uint64_t{low} * high;
    }
    return sum;
}

#if defined(__x86_64__)
// The same sums, four at a time.
__attribute__((target("avx2"))) std::uint64_t hash_block_avx2(const std::byte* block,
                                                              const std::uint32_t* pads) {
    const auto* data = reinterpret_cast<const __m256i*>(block);
    const auto* keys = reinterpret_cast<const __m256i*>(pads);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (std::size_t i = 0; i < FrameKey::block_nbytes / 32; i += 2) {
        const __m256i a = _mm256_add_epi32(_mm256_loadu_si256(data + i), _mm256_load_si256(keys + i));
        const __m256i b = _mm256_add_epi32(_mm256_loadu_si256(data + i + 1), _mm256_load_si256(keys + i + 1));
        even = _mm256_add_epi64(even, _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32)));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(b, _mm256_srli_epi64(b, 32)));
    }
    alignas(32) std::uint64_t sums[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(even, odd));
    return sums[0] + sums[1] + sums[2] + sums[3];
}

const BlockHash best_block_hash = __builtin_cpu_supports("avx2") ? hash_block_avx2 : hash_block;
#else
constexpr BlockHash best_block_hash = hash_block;
#endif

}  // namespace

std::uint64_t siphash(const std::array<std::uint64_t, 2>& key, Bytes message) {
    SipState state(key);
    const std::size_t whole = message.size() / 8 * 8;
    for (std::size_t i = 0; i < whole; i += 8) {
        state.add(load_word(message.data() + i));
    }
    std::uint64_t last = std::uint64_t{message.size()} << 56;
    for (std::size_t i = whole; i < message.size(); ++i) {
        last |= std::to_integer<std::uint64_t>(message[i]) << (8 * (i - whole));
    }
    return state.finish(last);
}

FrameKey::FrameKey(Bytes session, std::uint32_t source) {
    const std::array<std::uint64_t, 2> key{load_word(session.data()), load_word(session.data() + 8)};
    const std::uint64_t salt[2] = {load_word(session.data() + 16), load_word(session.data() + 24)};
    std::uint64_t number = 0;
    const auto next = [&] {  // SipHash as a source of numbers that only both ends can make
        const std::uint64_t input[4] = {salt[0], salt[1], source, number++};
        return siphash(key, std::as_bytes(std::span(input)));
    };
    header_key_ = {next(), next()};
    payload_key_ = {next(), next()};
    for (std::uint32_t& pad : pads_) {
        pad = static_cast<std::uint32_t>(next());
    }
}

std::uint64_t FrameKey::digest(Bytes payload) const {
    if (payload.size() <= tiny_nbytes) {
        return siphash(payload_key_, payload);
    }
    SipState state(payload_key_);
    const std::size_t whole = payload.size() / block_nbytes * block_nbytes;
    for (std::size_t i = 0; i < whole; i += block_nbytes) {
        state.add(best_block_hash(payload.data() + i, pads_.data()));
    }
    if (whole < payload.size()) {
        std::byte rest[block_nbytes] = {};
        std::memcpy(rest, payload.data() + whole, payload.size() - whole);
        state.add(best_block_hash(rest, pads_.data()));
    }
    return state.finish(payload.size());
}

// -- frames ---------------------------------------------------------------------------------------

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
    std::uint16_t cpu;
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
    Wire wire{magic, wire_version, static_cast<std::uint8_t>(header.kind), header.cpu, header.source,
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
    if (wire.version != wire_version) {
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
                  wire.number, wire.length, wire.digest, wire.cpu};
}

}  // namespace ferrodist::net
