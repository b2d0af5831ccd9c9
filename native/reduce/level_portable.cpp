// SPDX-License-Identifier: MIT OR Apache-2.0
// For every CPU the compiler builds for: SSE2 on x86-64, NEON on aarch64.
#include "reduce/make_level.hpp"

namespace ferrodist::reduce_levels {
namespace {

// float16 (1 sign bit, 5 of exponent, 10 of mantissa) for machines without instructions for it.
// The same bits as F16C, but for the payload of NaNs.
//
// Both ways follow Fabian Giesen's "half to float done quick": shift the fields into place, correct
// the exponent's bias, and let a float addition do the work for subnormal numbers.
constexpr std::uint32_t float_bias = 127, half_bias = 15;
constexpr int float_mantissa_bits = 23, mantissa_bits_lost = 13;

// The bits of the float32 with this biased exponent and an empty mantissa.
consteval std::uint32_t power_of_two(std::uint32_t biased_exponent) {
    return biased_exponent << float_mantissa_bits;
}

template <class Floats, class Bits, class Halves>
FERRODIST_INLINE Floats widen_float16_in_software(Halves halves) {
    constexpr std::uint32_t rebias = power_of_two(float_bias - half_bias);
    constexpr std::uint32_t half_infinity = 0x7C00u << mantissa_bits_lost;
    const Bits half = __builtin_convertvector(halves, Bits);
    const Bits magnitude = (half & 0x7FFF) << mantissa_bits_lost;
    const Bits normal = magnitude + rebias;
    // A subnormal has no leading one: put one there, then take it away as a number.
    const Bits leading_one = Bits{} + power_of_two(float_bias - half_bias + 1);
    const Floats subnormal = reinterpret_cast<Floats>(normal + power_of_two(1)) -
                             reinterpret_cast<Floats>(leading_one);
    const Bits finite =
        magnitude < power_of_two(1) ? reinterpret_cast<Bits>(subnormal) : normal;
    // Infinity and NaN have the largest exponent in either format.
    const Bits widened = magnitude < half_infinity ? finite : normal + rebias;
    return reinterpret_cast<Floats>(widened | ((half & 0x8000) << 16));
}

template <class Halves, class Bits, class Floats>
FERRODIST_INLINE Halves narrow_float16_in_software(Floats floats) {
    constexpr std::uint32_t infinity = 0x7F800000;
    constexpr std::uint32_t smallest_too_large = power_of_two(float_bias + half_bias + 1);
    constexpr std::uint32_t smallest_normal = power_of_two(float_bias - half_bias + 1);
    const Bits signed_bits = reinterpret_cast<Bits>(floats);
    const Bits bits = signed_bits & 0x7FFFFFFF;
    // Adds just under half of the last place kept, or exactly half where that place is odd. A
    // carry out of the mantissa raises the exponent, up to infinity, as it should.
    const Bits odd = (bits >> mantissa_bits_lost) & 1;
    const Bits rounded = bits - power_of_two(float_bias - half_bias) + 0xFFF + odd;
    // The addition lines the mantissa up with half's last place and rounds it on the way.
    const Bits aligner =
        Bits{} + power_of_two(float_bias - half_bias + 1 + mantissa_bits_lost);
    const Bits subnormal =
        reinterpret_cast<Bits>(reinterpret_cast<Floats>(bits) + reinterpret_cast<Floats>(aligner)) -
        aligner;
    const Bits finite = bits < smallest_normal ? subnormal : rounded >> mantissa_bits_lost;
    const Bits not_finite = bits > infinity ? Bits{} + 0x7E00 : Bits{} + 0x7C00;
    const Bits narrowed = bits < smallest_too_large ? finite : not_finite;
    return __builtin_convertvector(narrowed | (signed_bits >> 16 & 0x8000), Halves);
}

struct Portable {
    static constexpr std::size_t vector_bytes = 16;
    using Halves = Vector<std::uint16_t, 8>;
    using Floats = Vector<float, 16>;
    using Bits = Vector<std::uint32_t, 16>;

    FERRODIST_INLINE static Floats widen_float16(Halves halves) {
        return widen_float16_in_software<Floats, Bits>(halves);
    }
    FERRODIST_INLINE static Halves narrow_float16(Floats floats) {
        return narrow_float16_in_software<Halves, Bits>(floats);
    }
    FERRODIST_INLINE static Bits to_32_bits(Halves halves) {
        return __builtin_convertvector(halves, Bits);
    }
    FERRODIST_INLINE static Halves to_16_bits(Bits bits) {
        return __builtin_convertvector(bits, Halves);
    }
};

}  // namespace

constinit const Level portable = make_level<Portable>("portable");

}  // namespace ferrodist::reduce_levels
