// SPDX-License-Identifier: MIT OR Apache-2.0
// For x86-64 with AVX-512 F, BW, DQ and VL: Intel servers since Skylake, AMD since Zen 4.
#include <immintrin.h>

#include "reduce/make_level.hpp"

namespace ferrodist::reduce_levels {
namespace {

struct Avx512 {
    static constexpr std::size_t vector_bytes = 64;
    using Halves = Vector<std::uint16_t, 32>;
    using Floats = Vector<float, 64>;
    using Bits = Vector<std::uint32_t, 64>;

    // Every lane is asked for by mask: the intrinsics without one make GCC 12 warn of its own
    // header (GCC bug 105593).
    static constexpr __mmask16 every_lane = 0xFFFF;

    FERRODIST_INLINE static Floats widen_float16(Halves halves) {
        return reinterpret_cast<Floats>(
            _mm512_maskz_cvtph_ps(every_lane, reinterpret_cast<__m256i>(halves)));
    }
    FERRODIST_INLINE static Halves narrow_float16(Floats floats) {
        return reinterpret_cast<Halves>(_mm512_maskz_cvtps_ph(
            every_lane, reinterpret_cast<__m512>(floats), _MM_FROUND_TO_NEAREST_INT));
    }

    // GCC 12 takes four instructions for these where one does.
    FERRODIST_INLINE static Bits to_32_bits(Halves halves) {
        return reinterpret_cast<Bits>(
            _mm512_maskz_cvtepu16_epi32(every_lane, reinterpret_cast<__m256i>(halves)));
    }
    FERRODIST_INLINE static Halves to_16_bits(Bits bits) {
        return reinterpret_cast<Halves>(
            _mm512_maskz_cvtepi32_epi16(every_lane, reinterpret_cast<__m512i>(bits)));
    }
};

}  // namespace

constinit const Level avx512 = make_level<Avx512>("avx512");

}  // namespace ferrodist::reduce_levels
