// SPDX-License-Identifier: MIT OR Apache-2.0
// Fills in the table of kernels of one machine, when compiling.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "reduce/kernels.hpp"
#include "reduce/level.hpp"

namespace ferrodist::reduce_levels {

template <class Machine>
consteval void set_boolean(Level& level) {
    const ReduceKernel all = &reduce_kernel<Boolean<Machine>, And>;
    const ReduceKernel any = &reduce_kernel<Boolean<Machine>, Or>;
    for (Op op : {Op::prod, Op::min, Op::band}) {
        level.at(DType::boolean, op) = all;
    }
    for (Op op : {Op::sum, Op::max, Op::bor}) {
        level.at(DType::boolean, op) = any;
    }
    level.at(DType::boolean, Op::bxor) = &reduce_kernel<Boolean<Machine>, ExclusiveOr>;
}

// Signed and unsigned integers differ only in how they are ordered, and bits have no size.
template <class Machine, class Scalar>
consteval void set_integer(Level& level, DType dtype) {
    using Ordered = Plain<Machine, Scalar>;
    using Unsigned = Plain<Machine, std::make_unsigned_t<Scalar>>;
    using Bytes = Plain<Machine, std::uint8_t>;
    level.at(dtype, Op::sum) = &reduce_kernel<Unsigned, Sum>;
    level.at(dtype, Op::prod) = &reduce_kernel<Unsigned, Product>;
    level.at(dtype, Op::min) = &reduce_kernel<Ordered, Minimum>;
    level.at(dtype, Op::max) = &reduce_kernel<Ordered, Maximum>;
    level.at(dtype, Op::band) = &reduce_kernel<Bytes, And>;
    level.at(dtype, Op::bor) = &reduce_kernel<Bytes, Or>;
    level.at(dtype, Op::bxor) = &reduce_kernel<Bytes, ExclusiveOr>;
}

template <class Element>
consteval void set_float(Level& level, DType dtype) {
    level.at(dtype, Op::sum) = &reduce_kernel<Element, Sum>;
    level.at(dtype, Op::mean) = &reduce_kernel<Element, Sum, Divide>;
    level.at(dtype, Op::prod) = &reduce_kernel<Element, Product>;
    level.at(dtype, Op::min) = &reduce_kernel<Element, Minimum>;
    level.at(dtype, Op::max) = &reduce_kernel<Element, Maximum>;
}

// Sums and means of complex numbers are those of their parts.
template <class Part>
consteval void set_complex(Level& level, DType dtype) {
    level.at(dtype, Op::sum) = &reduce_kernel<Part, Sum>;
    level.at(dtype, Op::mean) = &reduce_kernel<Part, Sum, Divide>;
    level.at(dtype, Op::prod) = &reduce_kernel<Part, ComplexProduct>;
}

template <class Element>
consteval void set_logical(Level& level, DType dtype) {
    level.at(dtype, Op::land) = &reduce_kernel<Element, And>;
    level.at(dtype, Op::lor) = &reduce_kernel<Element, Or>;
    level.at(dtype, Op::lxor) = &reduce_kernel<Element, ExclusiveOr>;
}

template <class Machine, class Bits>
consteval void set_logical_integers(Level& level, std::initializer_list<DType> dtypes) {
    for (DType dtype : dtypes) {
        set_logical<Truth<Machine, Bits, static_cast<Bits>(~Bits{0}), Bits{1}>>(level, dtype);
    }
}

template <class Machine>
consteval void set_logical_ops(Level& level) {
    set_logical_integers<Machine, std::uint8_t>(level, {DType::boolean, DType::int8, DType::uint8});
    set_logical_integers<Machine, std::uint16_t>(level, {DType::int16, DType::uint16});
    set_logical_integers<Machine, std::uint32_t>(level, {DType::int32, DType::uint32});
    set_logical_integers<Machine, std::uint64_t>(level, {DType::int64, DType::uint64});
    set_logical<Truth<Machine, std::uint16_t, 0x7FFF, 0x3C00>>(level, DType::float16);
    set_logical<Truth<Machine, std::uint16_t, 0x7FFF, 0x3F80>>(level, DType::bfloat16);
    using Float = Truth<Machine, std::uint32_t, 0x7FFFFFFF, 0x3F800000>;
    using Double = Truth<Machine, std::uint64_t, 0x7FFFFFFFFFFFFFFF, 0x3FF0000000000000>;
    set_logical<Float>(level, DType::float32);
    set_logical<Double>(level, DType::float64);
    set_logical<ComplexTruth<Float>>(level, DType::complex64);
    set_logical<ComplexTruth<Double>>(level, DType::complex128);
}

template <class Machine>
consteval void set_integers(Level& level) {
    set_integer<Machine, std::int8_t>(level, DType::int8);
    set_integer<Machine, std::int16_t>(level, DType::int16);
    set_integer<Machine, std::int32_t>(level, DType::int32);
    set_integer<Machine, std::int64_t>(level, DType::int64);
    set_integer<Machine, std::uint8_t>(level, DType::uint8);
    set_integer<Machine, std::uint16_t>(level, DType::uint16);
    set_integer<Machine, std::uint32_t>(level, DType::uint32);
    set_integer<Machine, std::uint64_t>(level, DType::uint64);
}

template <class Machine>
consteval Level make_level(std::string_view name) {
    Level level{};
    level.name = name;
    set_boolean<Machine>(level);
    set_integers<Machine>(level);
    set_float<Float16<Machine>>(level, DType::float16);
    set_float<Bfloat16<Machine>>(level, DType::bfloat16);
    set_float<Plain<Machine, float>>(level, DType::float32);
    set_float<Plain<Machine, double>>(level, DType::float64);
    set_complex<Plain<Machine, float>>(level, DType::complex64);
    set_complex<Plain<Machine, double>>(level, DType::complex128);
    set_logical_ops<Machine>(level);
    level.at(DType::pair, Op::minloc) = &reduce_kernel<Plain<Machine, std::uint64_t>, LesserPair>;
    level.widen_float16 = &widen_kernel<Float16<Machine>>;
    level.widen_bfloat16 = &widen_kernel<Bfloat16<Machine>>;
    level.narrow_float16 = &narrow_kernel<Float16<Machine>>;
    level.narrow_bfloat16 = &narrow_kernel<Bfloat16<Machine>>;
    return level;
}

}  // namespace ferrodist::reduce_levels
