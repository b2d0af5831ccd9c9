// SPDX-License-Identifier: MIT OR Apache-2.0
// Level: the kernels compiled for one kind of CPU. Private to native/reduce.
#pragma once

#include "reduce/reduce.hpp"

namespace ferrodist::reduce_levels {

using ReduceKernel = void (*)(void* into, const void* const* operands, std::size_t num_operands,
                            std::size_t nbytes, std::uint64_t divisor);
using ConvertKernel = void (*)(void* into, const void* from, std::size_t count);

struct Level {
    std::string_view name;
    ReduceKernel folds[num_dtypes][num_ops];  // null where the op makes no sense for the dtype
    ConvertKernel widen_float16, widen_bfloat16;
    ConvertKernel narrow_float16, narrow_bfloat16;

    constexpr ReduceKernel& at(DType dtype, Op op) {
        return folds[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
    }
    constexpr ReduceKernel at(DType dtype, Op op) const {
        return folds[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
    }
};

extern const Level portable;
extern const Level avx2;
extern const Level avx512;

}  // namespace ferrodist::reduce_levels
