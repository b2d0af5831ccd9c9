// SPDX-License-Identifier: MIT OR Apache-2.0
// What combines two vectors of accumulators, and what is done to the last one.
#pragma once

#include <cstdint>
#include <utility>

#include "reduce/vectors.hpp"

namespace ferrodist::reduce_levels {

// Integers come here unsigned: signed ones would overflow, and the bits are the same.
struct Sum {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) { return left + right; }
};

struct Product {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) { return left * right; }
};

struct And {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) { return left & right; }
};

struct Or {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) { return left | right; }
};

struct ExclusiveOr {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) { return left ^ right; }
};

// A tie keeps the left operand, which decides between -0.0 and 0.0. For floats the second
// question lets a NaN on the right through; one on the left stays by itself.
struct Minimum {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) {
        const V smaller = right < left ? right : left;
        return right == right ? smaller : right;
    }
};

struct Maximum {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) {
        const V larger = right > left ? right : left;
        return right == right ? larger : right;
    }
};

// Vectors of real and imaginary parts in turn. The plain formula, each product rounded:
// (a.re b.re - a.im b.im, a.re b.im + a.im b.re).
struct ComplexProduct {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) {
        return multiply(left, right, std::make_index_sequence<num_lanes<V>>());
    }

private:
    template <class V, std::size_t... lane>
    FERRODIST_INLINE static V multiply(V left, V right, std::index_sequence<lane...>) {
        const V real = __builtin_shufflevector(left, left, (lane & ~1)...);
        const V imaginary = __builtin_shufflevector(left, left, (lane | 1)...);
        const V crossed = __builtin_shufflevector(right, right, (lane ^ 1)...);
        const V first = real * right, second = imaginary * crossed;
        // Even lanes of the difference, odd ones of the sum, whose numbers follow the others.
        return __builtin_shufflevector(first - second, first + second,
                                       (lane + (lane & 1) * sizeof...(lane))...);
    }
};

// Vectors of pairs of keys in turn: the less of two pairs, by the first key, then by the second.
struct LesserPair {
    template <class V>
    FERRODIST_INLINE static V apply(V left, V right) {
        return choose(left, right, std::make_index_sequence<num_lanes<V>>());
    }

private:
    template <class V, std::size_t... lane>
    FERRODIST_INLINE static V choose(V left, V right, std::index_sequence<lane...>) {
        const auto is_less = right < left, is_equal = right == left;
        const auto first_is_less = __builtin_shufflevector(is_less, is_less, (lane & ~1)...);
        const auto first_is_equal = __builtin_shufflevector(is_equal, is_equal, (lane & ~1)...);
        const auto second_is_less = __builtin_shufflevector(is_less, is_less, (lane | 1)...);
        return (first_is_less | (first_is_equal & second_is_less)) ? right : left;
    }
};

struct Keep {
    template <class V>
    FERRODIST_INLINE static V apply(V accumulated, std::uint64_t) { return accumulated; }
};

// A true division: multiplying by the reciprocal would round twice.
struct Divide {
    template <class V>
    FERRODIST_INLINE static V apply(V accumulated, std::uint64_t divisor) {
        return accumulated / static_cast<ScalarOf<V>>(divisor);
    }
};

}  // namespace ferrodist::reduce_levels
