// SPDX-License-Identifier: MIT OR Apache-2.0
// Vectors of the compiler (GCC and Clang): the same source for SSE2, NEON, AVX2 and AVX-512. And how elements in
// memory (`Stored`) become accumulators (`Accumulated`) and go back.
//
// The kernels are compiled once per CPU level. The linker keeps only one copy of an inline
// function, whichever level it was compiled for, so everything here and in the kernels is either
// always inlined or a template over a machine, a type local to the file of its level.
//
// A machine is a type with `vector_bytes`, with widen_float16 and narrow_float16, and with
// to_32_bits and to_16_bits, which change the size of unsigned integers that fit both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#define FERRODIST_INLINE [[gnu::always_inline]] inline

namespace ferrodist::reduce_levels {

// -- vectors ---------------------------------------------------------------------------------------

template <class Scalar, std::size_t nbytes>
struct VectorOf {
    typedef Scalar Type __attribute__((vector_size(nbytes)));
};
template <class Scalar, std::size_t nbytes>
using Vector = typename VectorOf<Scalar, nbytes>::Type;

template <class V>
using ScalarOf = std::remove_cvref_t<decltype(std::declval<V&>()[0])>;
template <class V>
constexpr std::size_t num_lanes = sizeof(V) / sizeof(ScalarOf<V>);

// Memory of users has any alignment: a memcpy of fixed size is one unaligned load or store.
template <class V>
FERRODIST_INLINE V load(const std::byte* from) {
    V vector;
    __builtin_memcpy(&vector, from, sizeof(V));
    return vector;
}

template <class V>
FERRODIST_INLINE void store(std::byte* into, V vector) {
    __builtin_memcpy(into, &vector, sizeof(V));
}

// The end of an array that fills no whole vector; the other lanes are zero.
template <class V>
FERRODIST_INLINE V load_part(const std::byte* from, std::size_t nbytes) {
    V vector{};
    __builtin_memcpy(&vector, from, nbytes);
    return vector;
}

template <class V>
FERRODIST_INLINE void store_part(std::byte* into, V vector, std::size_t nbytes) {
    __builtin_memcpy(into, &vector, nbytes);
}

// -- elements --------------------------------------------------------------------------------------

// Reduced as they are stored.
template <class Machine, class Scalar>
struct Plain {
    using Stored = Vector<Scalar, Machine::vector_bytes>;
    using Accumulated = Stored;
    FERRODIST_INLINE static Accumulated widen(Stored stored) { return stored; }
    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) { return accumulated; }
};

// Any byte but zero is true, as in NumPy; with 0 and 1 alone the logical ops are the bitwise ones.
template <class Machine>
struct Boolean {
    using Stored = Vector<std::uint8_t, Machine::vector_bytes>;
    using Accumulated = Stored;
    FERRODIST_INLINE static Accumulated widen(Stored stored) {
        const Stored one = Stored{} + std::uint8_t{1};
        return stored < one ? stored : one;
    }
    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) { return accumulated; }
};

// Any number as true or false: a mask of its bits. `magnitude` has the bits that are zero in zeros, `one` is the number
// that true becomes.
template <class Machine, class Bits, Bits magnitude, Bits one>
struct Truth {
    using Stored = Vector<Bits, Machine::vector_bytes>;
    using Accumulated = Stored;
    FERRODIST_INLINE static Accumulated widen(Stored stored) {
        return reinterpret_cast<Accumulated>((stored & magnitude) != Stored{});
    }
    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) { return accumulated & one; }
};

// A complex number is true if one of its parts is, and becomes a real part.
template <class Real>
struct ComplexTruth {
    using Stored = typename Real::Stored;
    using Accumulated = Stored;
    FERRODIST_INLINE static Accumulated widen(Stored stored) {
        return join(Real::widen(stored), std::make_index_sequence<num_lanes<Stored>>());
    }
    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) {
        return keep_real(Real::narrow(accumulated), std::make_index_sequence<num_lanes<Stored>>());
    }

private:
    template <std::size_t... lane>
    FERRODIST_INLINE static Stored join(Stored parts, std::index_sequence<lane...>) {
        return parts | __builtin_shufflevector(parts, parts, (lane ^ 1)...);
    }
    // Odd lanes are of the second vector, which is zero.
    template <std::size_t... lane>
    FERRODIST_INLINE static Stored keep_real(Stored parts, std::index_sequence<lane...>) {
        return __builtin_shufflevector(parts, Stored{}, (lane + (lane & 1) * sizeof...(lane))...);
    }
};

template <class Machine>
struct Float16 {
    using Stored = Vector<std::uint16_t, Machine::vector_bytes / 2>;
    using Accumulated = Vector<float, Machine::vector_bytes>;
    FERRODIST_INLINE static Accumulated widen(Stored stored) { return Machine::widen_float16(stored); }
    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) { return Machine::narrow_float16(accumulated); }
};

// The upper half of a float32.
template <class Machine>
struct Bfloat16 {
    using Stored = Vector<std::uint16_t, Machine::vector_bytes / 2>;
    using Accumulated = Vector<float, Machine::vector_bytes>;
    using Bits = Vector<std::uint32_t, Machine::vector_bytes>;

    FERRODIST_INLINE static Accumulated widen(Stored stored) {
        return reinterpret_cast<Accumulated>(Machine::to_32_bits(stored) << 16);
    }

    FERRODIST_INLINE static Stored narrow(Accumulated accumulated) {
        const Bits bits = reinterpret_cast<Bits>(accumulated);
        // Adds just under half of the last place kept, or exactly half where that place is odd.
        const Bits rounded = bits + 0x7FFF + ((bits >> 16) & 1);
        // Rounding could carry a NaN into infinity or beyond: cut it, and keep a bit set.
        const Bits result = accumulated == accumulated ? rounded : bits | 0x400000;
        return Machine::to_16_bits(result >> 16);
    }
};

}  // namespace ferrodist::reduce_levels
