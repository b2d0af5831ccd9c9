// SPDX-License-Identifier: MIT OR Apache-2.0
// For x86-64 with AVX2 and F16C: Intel since Haswell, AMD since Zen.
#include <immintrin.h>

#include "reduce/make_level.hpp"

namespace ferrodist::reduce_levels {
namespace {

struct Avx2 {
    static constexpr std::size_t vector_bytes = 32;
    using Halves = Vector<std::uint16_t, 16>;
    using Floats = Vector<float, 32>;
    using Bits = Vector<std::uint32_t, 32>;

    FERRODIST_INLINE static Floats widen_float16(Halves halves) {
        return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
    }
    FERRODIST_INLINE static Halves narrow_float16(Floats floats) {
        return reinterpret_cast<Halves>(
            _mm256_cvtps_ph(reinterpret_cast<__m256>(floats), _MM_FROUND_TO_NEAREST_INT));
    }

    // GCC 12 takes four instructions for these where one or two do.
    FERRODIST_INLINE static Bits to_32_bits(Halves halves) {
        return reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
    }
    FERRODIST_INLINE static Halves to_16_bits(Bits bits) {
        const __m256i words = reinterpret_cast<__m256i>(bits);
        return reinterpret_cast<Halves>(
            _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
};

}  // namespace

constinit const Level avx2 = make_level<Avx2>("avx2");

}  // namespace ferrodist::reduce_levels
