// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernels, as templates over elements, which know the machine they are compiled for.
#pragma once

#include <cstdint>
#include <utility>

#include "reduce/operations.hpp"
#include "reduce/vectors.hpp"

namespace ferrodist::reduce_levels {

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
