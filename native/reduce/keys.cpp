// SPDX-License-Identifier: MIT OR Apache-2.0
// Numbers as keys: unsigned integers that are ordered as the numbers are, so that one kernel finds the least pair of
// every dtype.
#include <cstring>

#include "reduce/reduce.hpp"

namespace ferrodist {
namespace {

template <class Bits>
constexpr Bits sign_bit = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));

template <class Bits>
struct Unsigned {
    using Stored = Bits;
    static Bits to_key(Bits bits) { return bits; }
    static Bits from_key(Bits key) { return key; }
    static bool is_nan(Bits) { return false; }
};

struct Bool : Unsigned<std::uint8_t> {
    static std::uint8_t to_key(std::uint8_t byte) { return byte != 0; }
};

template <class Bits>
struct Signed : Unsigned<Bits> {
    static Bits to_key(Bits bits) { return bits ^ sign_bit<Bits>; }
    static Bits from_key(Bits key) { return key ^ sign_bit<Bits>; }
};

// Sign and magnitude. The keys below that of minus infinity, or in reverse of infinity, are those of NaNs.
template <class Bits, Bits infinity>
struct Float {
    using Stored = Bits;
    static constexpr Bits sign = sign_bit<Bits>;
    static Bits magnitude(Bits bits) { return static_cast<Bits>(bits & ~sign); }
    static Bits to_key(Bits bits) {
        const bool is_negative = (bits & sign) != 0 && magnitude(bits) != 0;
        return is_negative ? static_cast<Bits>(~bits) : static_cast<Bits>(bits | sign);
    }
    static Bits from_key(Bits key) { return (key & sign) != 0 ? static_cast<Bits>(key ^ sign) : static_cast<Bits>(~key); }
    static bool is_nan(Bits bits) { return magnitude(bits) > infinity; }
};

// Calls `use` with the element of a real dtype.
template <class Use>
void with_element(DType dtype, Use use) {
    switch (dtype) {
        case DType::boolean: return use(Bool{});
        case DType::int8: return use(Signed<std::uint8_t>{});
        case DType::int16: return use(Signed<std::uint16_t>{});
        case DType::int32: return use(Signed<std::uint32_t>{});
        case DType::int64: return use(Signed<std::uint64_t>{});
        case DType::uint8: return use(Unsigned<std::uint8_t>{});
        case DType::uint16: return use(Unsigned<std::uint16_t>{});
        case DType::uint32: return use(Unsigned<std::uint32_t>{});
        case DType::uint64: return use(Unsigned<std::uint64_t>{});
        case DType::float16: return use(Float<std::uint16_t, 0x7C00>{});
        case DType::bfloat16: return use(Float<std::uint16_t, 0x7F80>{});
        case DType::float32: return use(Float<std::uint32_t, 0x7F800000>{});
        case DType::float64: return use(Float<std::uint64_t, 0x7FF0000000000000>{});
        default: return;  // has no order, and is refused before
    }
}

template <class Bits>
Bits reverse_if(bool is_reversed, Bits key) {
    return is_reversed ? static_cast<Bits>(~key) : key;
}

}  // namespace

void pack_keys(DType dtype, bool is_reversed, void* first_key, const void* numbers, std::size_t count) {
    with_element(dtype, [&]<class Element>(Element) {
        using Bits = typename Element::Stored;
        auto* into = static_cast<std::byte*>(first_key);
        const auto* from = static_cast<const std::byte*>(numbers);
        for (; count > 0; --count, into += item_size(DType::pair), from += sizeof(Bits)) {
            Bits bits;
            std::memcpy(&bits, from, sizeof(Bits));
            const std::uint64_t key = Element::is_nan(bits) ? 0 : reverse_if(is_reversed, Element::to_key(bits));
            std::memcpy(into, &key, sizeof(key));
        }
    });
}

void unpack_keys(DType dtype, bool is_reversed, void* numbers, const void* first_key, std::size_t count) {
    with_element(dtype, [&]<class Element>(Element) {
        using Bits = typename Element::Stored;
        auto* into = static_cast<std::byte*>(numbers);
        const auto* from = static_cast<const std::byte*>(first_key);
        for (; count > 0; --count, into += sizeof(Bits), from += item_size(DType::pair)) {
            std::uint64_t key;
            std::memcpy(&key, from, sizeof(key));
            const Bits bits = Element::from_key(reverse_if(is_reversed, static_cast<Bits>(key)));
            std::memcpy(into, &bits, sizeof(Bits));
        }
    });
}

}  // namespace ferrodist
