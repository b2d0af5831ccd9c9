// SPDX-License-Identifier: MIT OR Apache-2.0
// Whether there is a core for every rank.
#include <sched.h>

#include <bit>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/cpus.hpp"

namespace ferrodist::tests {
namespace {

using shm::CpuMask;

// Keeps the calling thread on the first `count` of the cores it may use; false if there are fewer.
bool use_cores(int count) {
    const CpuMask allowed = shm::allowed_cpus();
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core = 0; core < 1024 && CPU_COUNT(&set) < count; ++core) {
        if (allowed[static_cast<std::size_t>(core) / 64] >> core % 64 & 1) {
            CPU_SET(core, &set);
        }
    }
    return CPU_COUNT(&set) == count && sched_setaffinity(0, sizeof(set), &set) == 0;
}

}  // namespace

TEST(cores_that_several_ranks_may_use_count_once) {
    CpuMask none{}, low{}, both{}, last{};
    low[0] = 0b0110;
    both[0] = 0b0011;
    last[15] = std::uint64_t{1} << 63;
    CHECK_EQUAL(shm::count_union(std::vector{none, none}), 0u);
    CHECK_EQUAL(shm::count_union(std::vector{low}), 2u);
    CHECK_EQUAL(shm::count_union(std::vector{low, both}), 3u);
    CHECK_EQUAL(shm::count_union(std::vector{low, both, last, low}), 4u);
}

TEST(the_affinity_of_a_process_is_what_its_arena_shows) {
    run_threads(1, [](int) {  // affinity is a thread's own
        CHECK(use_cores(1));
        CHECK_EQUAL(shm::count_union(std::vector{shm::allowed_cpus()}), 1u);
        const auto arena = shm::make_arena(0, 1 << 20);
        CHECK_EQUAL(shm::count_union(std::vector{reinterpret_cast<shm::ArenaHeader*>(arena->base())->cpus}), 1u);
    });
}

TEST(two_ranks_on_one_core_do_not_have_a_core_each) {
    run_threads(1, [](int) {
        const bool has_two = use_cores(2) && shm::container_cpus() >= 2;
        Host two(2);
        CHECK_EQUAL(two.world(0)->has_a_core_each(), has_two);
        CHECK(use_cores(1));
        Host crowded(2), alone(1);
        CHECK(!crowded.world(0)->has_a_core_each());
        CHECK(alone.world(0)->has_a_core_each());
    });
}

}  // namespace ferrodist::tests
