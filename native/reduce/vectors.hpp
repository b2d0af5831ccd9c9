// SPDX-License-Identifier: MIT OR Apache-2.0
// Vectors of the compiler (GCC and Clang): the same source for SSE2, NEON, AVX2 and AVX-512.
//
// The kernels are compiled once per CPU level. The linker keeps only one copy of an inline
// function, whichever level it was compiled for, so everything here and in the kernels is either
// always inlined or a template over a machine, a type local to the file of its level.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#define FERRODIST_INLINE [[gnu::always_inline]] inline

namespace ferrodist::reduce_levels {

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

}  // namespace ferrodist::reduce_levels
