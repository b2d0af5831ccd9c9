// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/cpus.hpp"

#include <sched.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <limits>

namespace ferrodist::shm {
namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

std::size_t whole_cpus(long long quota, long long period) {
    return quota > 0 && period > 0 ? static_cast<std::size_t>((quota + period - 1) / period)
                                   : unlimited;
}

}  // namespace

CpuMask allowed_cpus() {
    CpuMask mask{};
    cpu_set_t set;
    static_assert(sizeof(set) == sizeof(mask));
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        std::memcpy(mask.data(), &set, sizeof(set));
    }
    return mask;
}

std::size_t count_union(std::span<const CpuMask> masks) {
    std::size_t count = 0;
    for (std::size_t word = 0; word < CpuMask{}.size(); ++word) {
        std::uint64_t bits = 0;
        for (const CpuMask& mask : masks) {
            bits |= mask[word];
        }
        count += static_cast<std::size_t>(std::popcount(bits));
    }
    return count;
}

std::size_t container_cpus() {
    long long quota = 0, period = 0;
    if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> quota >> period) {
        return whole_cpus(quota, period);
    }
    std::ifstream quotas("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    std::ifstream periods("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    return quotas >> quota && periods >> period ? whole_cpus(quota, period) : unlimited;
}

}  // namespace ferrodist::shm
