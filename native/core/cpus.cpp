// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/cpus.hpp"

#include <fstream>
#include <limits>

namespace ferrodist::core {
namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

std::size_t whole_cpus(long long quota, long long period) {
    return quota > 0 && period > 0 ? static_cast<std::size_t>((quota + period - 1) / period)
                                   : unlimited;
}

}  // namespace

std::size_t container_cpus() {
    long long quota = 0, period = 0;
    if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> quota >> period) {
        return whole_cpus(quota, period);
    }
    std::ifstream quotas("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    std::ifstream periods("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    return quotas >> quota && periods >> period ? whole_cpus(quota, period) : unlimited;
}

}  // namespace ferrodist::core
