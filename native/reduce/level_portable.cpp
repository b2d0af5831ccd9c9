// SPDX-License-Identifier: MIT OR Apache-2.0
// For every CPU the compiler builds for: SSE2 on x86-64, NEON on aarch64.
#include "reduce/float16_software.hpp"
#include "reduce/make_level.hpp"

namespace ferrodist::reduce_levels {
namespace {

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
