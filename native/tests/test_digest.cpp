// SPDX-License-Identifier: MIT OR Apache-2.0
// The keyed hashes: against published values, against a plain way to say the same, and for what
// every bit and every place of a payload does to them.
#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <vector>

#include "check.hpp"
#include "net/frame.hpp"

namespace ferrodist::tests {
namespace {

using net::Bytes;
using net::FrameKey;
using Words = std::array<std::uint64_t, 2>;
using Buffer = std::vector<std::byte>;

Buffer counting(std::size_t size, std::size_t first = 0) {
    Buffer bytes(size);
    for (std::size_t i = 0; i < size; ++i) {
        bytes[i] = static_cast<std::byte>(first + i);
    }
    return bytes;
}

std::uint64_t word_at(const Buffer& bytes, std::size_t place) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < 8; ++i) {
        word |= std::to_integer<std::uint64_t>(bytes.at(place + i)) << 8 * i;
    }
    return word;
}

FrameKey key_of(std::uint32_t source, std::size_t first = 0) {
    return FrameKey(counting(FrameKey::session_nbytes, first), source);
}

// The digest of what is not tiny, said again as plainly as can be: numbers from SipHash, one product per
// eight bytes, and SipHash over the sums of the blocks, with the length for its end.
class PlainDigest {
public:
    PlainDigest(const Buffer& session, std::uint32_t source) {
        for (std::uint64_t number = 0; number < 4 + FrameKey::block_nbytes / 4; ++number) {
            Buffer message(session.begin() + 16, session.end());
            for (const std::uint64_t word : {std::uint64_t{source}, number}) {
                const auto* bytes = reinterpret_cast<const std::byte*>(&word);
                message.insert(message.end(), bytes, bytes + 8);
            }
            numbers_.push_back(net::siphash({word_at(session, 0), word_at(session, 8)}, message));
        }
    }

    std::uint64_t of(Buffer payload) const {
        if (payload.size() <= FrameKey::tiny_nbytes) {
            return net::siphash({numbers_[2], numbers_[3]}, payload);
        }
        const std::uint64_t size = payload.size();
        payload.resize((size + FrameKey::block_nbytes - 1) / FrameKey::block_nbytes * FrameKey::block_nbytes);
        std::vector<std::uint64_t> sums(payload.size() / FrameKey::block_nbytes);
        for (std::size_t i = 0; i < payload.size() / 8; ++i) {
            const std::uint64_t word = word_at(payload, 8 * i);
            const std::size_t pad = 4 + 2 * (i % (FrameKey::block_nbytes / 8));
            sums[i / (FrameKey::block_nbytes / 8)] += low_half(low_half(word) + numbers_[pad]) *
                                                      low_half((word >> 32) + numbers_[pad + 1]);
        }
        return over_words({numbers_[2], numbers_[3]}, sums, size);
    }

private:
    static std::uint64_t low_half(std::uint64_t word) { return word & 0xffffffff; }

    static std::uint64_t over_words(const Words& key, std::vector<std::uint64_t> words, std::uint64_t last) {
        std::uint64_t a = key[0] ^ 0x736f6d6570736575, b = key[1] ^ 0x646f72616e646f6d;
        std::uint64_t c = key[0] ^ 0x6c7967656e657261, d = key[1] ^ 0x7465646279746573;
        const auto mix = [&](int times) {
            for (int i = 0; i < times; ++i) {
                a += b, b = std::rotl(b, 13), b ^= a, a = std::rotl(a, 32);
                c += d, d = std::rotl(d, 16), d ^= c;
                a += d, d = std::rotl(d, 21), d ^= a;
                c += b, b = std::rotl(b, 17), b ^= c, c = std::rotl(c, 32);
            }
        };
        words.push_back(last);
        for (const std::uint64_t word : words) {
            d ^= word;
            mix(2);
            a ^= word;
        }
        c ^= 0xff;
        mix(4);
        return a ^ b ^ c ^ d;
    }

    std::vector<std::uint64_t> numbers_;  // two for headers, two for payloads, the pads
};

}  // namespace

// The first sixteen of the test values that came with SipHash-2-4: the key is the bytes 0 to 15, the
// message the bytes 0 to its length.
TEST(siphash_gives_the_published_values) {
    constexpr std::uint64_t published[] = {
        0x726fdb47dd0e0e31, 0x74f839c593dc67fd, 0x0d6c8009d9a94f5a, 0x85676696d7fb7e2d,
        0xcf2794e0277187b7, 0x18765564cd99a68d, 0xcbc9466e58fee3ce, 0xab0200f58b01d137,
        0x93f5f5799a932462, 0x9e0082df0ba9e4b0, 0x7a5dbbc594ddb9f3, 0xf4b32f46226bada7,
        0x751e8fbc860ee5fb, 0x14ea5627c0843d90, 0xf723ca908e7af2ee, 0xa129ca6149be45e5};
    const Buffer key = counting(16);
    for (std::size_t length = 0; length < std::size(published); ++length) {
        CHECK_EQUAL(net::siphash(Words{word_at(key, 0), word_at(key, 8)}, counting(length)), published[length]);
    }
}

TEST(siphash_of_a_long_message_depends_on_every_bit_of_it_and_of_the_key) {
    Buffer message = counting(63);
    const Words key{1, 2};
    std::set<std::uint64_t> found{net::siphash(key, message)};
    for (std::size_t bit = 0; bit < 8 * message.size(); ++bit) {
        message[bit / 8] ^= std::byte(1 << bit % 8);
        found.insert(net::siphash(key, message));
        message[bit / 8] ^= std::byte(1 << bit % 8);
    }
    for (int bit = 0; bit < 128; ++bit) {
        Words other = key;
        other[static_cast<std::size_t>(bit / 64)] ^= std::uint64_t{1} << bit % 64;
        found.insert(net::siphash(other, message));
    }
    CHECK_EQUAL(found.size(), 1 + 8 * message.size() + 128);
}

TEST(the_digest_is_what_the_plain_way_says_wherever_blocks_end) {
    const Buffer session = counting(FrameKey::session_nbytes, 200);
    for (const std::uint32_t source : {0u, 1u, 0xffffffffu}) {
        const FrameKey key(session, source);
        const PlainDigest plain(session, source);
        for (const std::size_t size : {1u, 7u, 8u, 33u, 127u, 128u, 129u, 1000u, 1023u, 1024u, 1025u, 2047u, 2048u, 5000u}) {
            Buffer payload(size);
            for (std::size_t i = 0; i < size; ++i) {
                payload[i] = static_cast<std::byte>(i * i % 251 + source);
            }
            CHECK_EQUAL(key.digest(payload), plain.of(payload));
        }
        CHECK_EQUAL(key.digest(Buffer(3000, std::byte{0xff})), plain.of(Buffer(3000, std::byte{0xff})));
    }
}

TEST(the_digest_of_memory_does_not_depend_on_where_it_lies) {
    const FrameKey key = key_of(3);
    const Buffer payload = counting(3000);
    const std::uint64_t expected = key.digest(payload);
    for (std::size_t shift = 1; shift < 64; ++shift) {
        Buffer shifted(shift);
        shifted.insert(shifted.end(), payload.begin(), payload.end());
        CHECK_EQUAL(key.digest(Bytes(shifted).subspan(shift)), expected);
    }
}

TEST(every_bit_of_a_payload_changes_its_digest) {
    const FrameKey key = key_of(0);
    for (const std::size_t size : {1u, 9u, 100u, 128u, 129u, 1024u, 1100u}) {
        Buffer payload = counting(size, 17);
        std::set<std::uint64_t> found{key.digest(payload)};
        for (std::size_t bit = 0; bit < 8 * size; ++bit) {
            payload[bit / 8] ^= std::byte(1 << bit % 8);
            found.insert(key.digest(payload));
            payload[bit / 8] ^= std::byte(1 << bit % 8);
        }
        CHECK_EQUAL(found.size(), 8 * size + 1);
    }
}

TEST(the_length_of_a_payload_changes_its_digest_though_all_of_it_is_zero) {
    const FrameKey key = key_of(0);
    std::set<std::uint64_t> found;
    for (std::size_t size = 1; size <= 2100; ++size) {
        found.insert(key.digest(Buffer(size)));
    }
    CHECK_EQUAL(found.size(), 2100u);
}

TEST(blocks_words_and_halves_that_change_places_change_the_digest) {
    const FrameKey key = key_of(0);
    Buffer payload(4 * FrameKey::block_nbytes);
    for (std::size_t i = 0; i < payload.size(); ++i) {
        payload[i] = static_cast<std::byte>(i / 4);  // all halves of words differ from their neighbours
    }
    payload[0] ^= std::byte{0xff};  // and the first block from the second
    for (const std::size_t part : {std::size_t{4}, std::size_t{8}, std::size_t{32}, FrameKey::block_nbytes}) {
        Buffer swapped = payload;
        const auto begin = swapped.begin(), middle = begin + static_cast<std::ptrdiff_t>(part);
        std::swap_ranges(begin, middle, middle);
        CHECK(swapped != payload);
        CHECK(key.digest(swapped) != key.digest(payload));
    }
}

TEST(each_rank_and_each_session_has_a_key_of_its_own) {
    const Buffer payload = counting(100);
    std::set<std::uint64_t> signatures, digests;
    for (std::uint32_t source = 0; source < 10; ++source) {
        for (std::size_t first = 0; first < 10; ++first) {
            const FrameKey key = key_of(source, first);
            signatures.insert(key.sign(payload));
            digests.insert(key.digest(payload));
        }
    }
    CHECK_EQUAL(signatures.size(), 100u);
    CHECK_EQUAL(digests.size(), 100u);
}

}  // namespace ferrodist::tests
