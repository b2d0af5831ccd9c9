// SPDX-License-Identifier: MIT OR Apache-2.0
// Reducing: combining the contributions of several ranks, element by element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ferrodist {

// The codes of ferrodist.buffer.DType.
enum class DType : std::uint8_t {
    boolean, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
    float16, bfloat16, float32, float64, complex64, complex128,
    pair,  // two keys, of a value and of its index; see pack_keys
};
constexpr std::size_t num_dtypes = 16;
constexpr std::size_t num_array_dtypes = 15;  // those of arrays: pairs are only reduced

// The codes of ferrodist.reduce_op.ReduceOp.
enum class Op : std::uint8_t { sum, mean, prod, min, max, band, bor, bxor, land, lor, lxor, minloc };
constexpr std::size_t num_ops = 12;

constexpr std::size_t item_size(DType dtype) {
    constexpr std::uint8_t sizes[num_dtypes] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 16};
    return sizes[static_cast<std::size_t>(dtype)];
}

constexpr bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// False for a mean of integers or bools, min and max of complex, bit operations of floats. Pairs have minloc, and
// nothing else has.
bool can_reduce(DType dtype, Op op);

// into = ((operands[0] op operands[1]) op operands[2]) ..., strictly from left to right, for at
// least one operand. The mean is the sum divided once by `divisor`; other ops ignore `divisor`. The logical ops give
// 0 and 1, of one operand too.
// 16-bit floats are reduced and divided as float32 and rounded once. Pointers need no alignment.
// `into` may be one or several of the operands, but must not overlap one partly.
void local_reduce(DType dtype, Op op, void* into, const void* const* operands, std::size_t num_operands,
          std::size_t count, std::uint64_t divisor);

// From a 16-bit float to float32: exact.
void widen(DType half, void* into_float32, const void* from_half, std::size_t count);

// From float32 to a 16-bit float: rounds to nearest even, too large becomes infinite.
void narrow(DType half, void* into_half, const void* from_float32, std::size_t count);

// Writes real numbers as 64-bit keys that are ordered as the numbers are, each 16 bytes behind the last: `first_key` is
// in a pair, which the least key wins. Of equal values the least index does. NaN is less than everything; zeros of
// either sign are equal. `is_reversed`: the largest number has the least key, and NaN still wins.
void pack_keys(DType dtype, bool is_reversed, void* first_key, const void* numbers, std::size_t count);

// The way back; a zero is positive.
void unpack_keys(DType dtype, bool is_reversed, void* numbers, const void* first_key, std::size_t count);

// Names of the variants of the kernels this machine can run, best first. All give the same bits.
std::vector<std::string_view> cpu_levels();
std::string_view cpu_level();
// Returns false where this machine has no such level. For tests and for hunting bugs.
bool try_use_cpu_level(std::string_view name);

}  // namespace ferrodist
