// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernels, as templates over elements, which know the machine they are compiled for.
#pragma once

#include <cstdint>
#include <utility>

#include "reduce/elements.hpp"

namespace ferrodist::reduce_levels {

// -- what combines two vectors of accumulators, and what is done to the last one --------------------

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

// -- the kernels -------------------------------------------------------------------------------------

// Reduces a tile: a few vectors side by side, held in registers over all operands. Nothing is stored
// before everything is loaded, so `into` may be any of the operands.
template <class Element, class Operation, class Finish, std::size_t... index>
FERRODIST_INLINE void reduce_tile(std::byte* into, const void* const* operands,
                                std::size_t num_operands, std::size_t offset,
                                std::uint64_t divisor, std::index_sequence<index...>) {
    constexpr std::size_t step = sizeof(typename Element::Stored);
    const auto read = [&](std::size_t operand, std::size_t shift) {
        const auto* start = static_cast<const std::byte*>(operands[operand]);
        return Element::widen(load<typename Element::Stored>(start + offset + shift));
    };
    typename Element::Accumulated accumulated[] = {read(0, index * step)...};
    for (std::size_t i = 1; i < num_operands; ++i) {
        ((accumulated[index] = Operation::apply(accumulated[index], read(i, index * step))), ...);
    }
    ((accumulated[index] = Finish::apply(accumulated[index], divisor)), ...);
    (store(into + offset + index * step, Element::narrow(accumulated[index])), ...);
}

// Reduces what is left at the end, less than a vector.
template <class Element, class Operation, class Finish>
FERRODIST_INLINE void reduce_rest(std::byte* into, const void* const* operands,
                                std::size_t num_operands, std::size_t offset, std::size_t nbytes,
                                std::uint64_t divisor) {
    using Stored = typename Element::Stored;
    const auto* first = static_cast<const std::byte*>(operands[0]) + offset;
    auto accumulated = Element::widen(load_part<Stored>(first, nbytes));
    for (std::size_t i = 1; i < num_operands; ++i) {
        const auto* next = static_cast<const std::byte*>(operands[i]) + offset;
        accumulated = Operation::apply(accumulated, Element::widen(load_part<Stored>(next, nbytes)));
    }
    store_part(into + offset, Element::narrow(Finish::apply(accumulated, divisor)), nbytes);
}

template <class Element, class Operation, class Finish = Keep>
void reduce_kernel(void* into, const void* const* operands, std::size_t num_operands,
                 std::size_t nbytes, std::uint64_t divisor) {
    constexpr std::size_t vector = sizeof(typename Element::Stored);
    constexpr std::size_t tile = 4 * vector;  // enough to hide the latency of an addition
    auto* const start = static_cast<std::byte*>(into);
    std::size_t offset = 0;
    for (; offset + tile <= nbytes; offset += tile) {
        reduce_tile<Element, Operation, Finish>(start, operands, num_operands, offset, divisor,
                                              std::make_index_sequence<4>());
    }
    for (; offset + vector <= nbytes; offset += vector) {
        reduce_tile<Element, Operation, Finish>(start, operands, num_operands, offset, divisor,
                                              std::make_index_sequence<1>());
    }
    if (offset < nbytes) {
        reduce_rest<Element, Operation, Finish>(start, operands, num_operands, offset,
                                              nbytes - offset, divisor);
    }
}

template <class Element>
void widen_kernel(void* into, const void* from, std::size_t count) {
    using Stored = typename Element::Stored;
    constexpr std::size_t lanes = num_lanes<Stored>;
    auto* floats = static_cast<std::byte*>(into);
    const auto* halves = static_cast<const std::byte*>(from);
    for (; count >= lanes; count -= lanes, halves += 2 * lanes, floats += 4 * lanes) {
        store(floats, Element::widen(load<Stored>(halves)));
    }
    if (count > 0) {
        store_part(floats, Element::widen(load_part<Stored>(halves, 2 * count)), 4 * count);
    }
}

template <class Element>
void narrow_kernel(void* into, const void* from, std::size_t count) {
    using Accumulated = typename Element::Accumulated;
    constexpr std::size_t lanes = num_lanes<Accumulated>;
    auto* halves = static_cast<std::byte*>(into);
    const auto* floats = static_cast<const std::byte*>(from);
    for (; count >= lanes; count -= lanes, halves += 2 * lanes, floats += 4 * lanes) {
        store(halves, Element::narrow(load<Accumulated>(floats)));
    }
    if (count > 0) {
        store_part(halves, Element::narrow(load_part<Accumulated>(floats, 4 * count)), 2 * count);
    }
}

}  // namespace ferrodist::reduce_levels
