// SPDX-License-Identifier: MIT OR Apache-2.0
// Chooses the kernel: by CPU level once, by dtype and op at every call.
#include <array>
#include <atomic>
#include <span>

#include "reduce/reduce.hpp"
#include "reduce/level.hpp"

namespace ferrodist {
namespace {

using reduce_levels::Level;

#if defined(__x86_64__)
constexpr std::array<const Level*, 3> best_first = {&reduce_levels::avx512, &reduce_levels::avx2,
                                                    &reduce_levels::portable};

// How many this machine cannot run. These also ask whether the operating system saves the registers.
std::size_t num_skipped() {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_avx512 ? 0 : has_avx2 ? 1 : 2;
}
#else
constexpr std::array<const Level*, 1> best_first = {&reduce_levels::portable};
std::size_t num_skipped() { return 0; }
#endif

// The levels this machine can run, best first.
std::span<const Level* const> runnable() { return std::span(best_first).subspan(num_skipped()); }

// Relaxed everywhere: levels are constants, so there is nothing to order with the pointer.
std::atomic<const Level*> chosen{runnable().front()};

const Level& level() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace

bool can_reduce(DType dtype, Op op) { return level().at(dtype, op) != nullptr; }

void local_reduce(DType dtype, Op op, void* into, const void* const* operands, std::size_t num_operands,
          std::size_t count, std::uint64_t divisor) {
    level().at(dtype, op)(into, operands, num_operands, count * item_size(dtype), divisor);
}

void widen(DType half, void* into_float32, const void* from_half, std::size_t count) {
    const bool is_float16 = half == DType::float16;
    const auto convert = is_float16 ? level().widen_float16 : level().widen_bfloat16;
    convert(into_float32, from_half, count);
}

void narrow(DType half, void* into_half, const void* from_float32, std::size_t count) {
    const bool is_float16 = half == DType::float16;
    const auto convert = is_float16 ? level().narrow_float16 : level().narrow_bfloat16;
    convert(into_half, from_float32, count);
}

std::vector<std::string_view> cpu_levels() {
    std::vector<std::string_view> names;
    for (const Level* one : runnable()) {
        names.push_back(one->name);
    }
    return names;
}

std::string_view cpu_level() { return level().name; }

bool try_use_cpu_level(std::string_view name) {
    for (const Level* one : runnable()) {
        if (one->name == name) {
            chosen.store(one, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace ferrodist
