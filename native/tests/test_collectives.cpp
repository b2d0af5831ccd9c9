// SPDX-License-Identifier: MIT OR Apache-2.0
// Every collective gives the right result, whatever memory the ranks have and whatever came before.
#include <algorithm>
#include <iterator>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"

namespace ferrodist::tests {
namespace {

using shm::Kind;
using shm::Slot;

// Around everything that decides how a call goes: slot, message, piece, segment, several of them, odd ends.
constexpr std::size_t sizes[] = {
    0, 8, 1000, Slot::capacity, Slot::capacity + 8, (16 << 10) - 8, 16 << 10, (32 << 10) + 8, 33'000, 64 << 10,
    (256 << 10) - 64, 256 << 10, (512 << 10) + 64, 333'333, (1 << 20) + 64, 3'333'333,
};

// The more ranks, the more each call moves: larger worlds have fewer kinds of memory for each.
std::vector<Case> all_cases(int world) {
    constexpr Memory memories[] = {Memory::all_private, Memory::any, Memory::all_shared, Memory::any};
    const std::size_t num_memories = world > 4 ? 1 : world > 2 ? 2 : 4;
    Random random(static_cast<unsigned>(world));
    std::vector<Case> cases;
    for (int kind = 0; kind < num_kinds; ++kind) {
        for (const std::size_t size : sizes) {
            for (const DType dtype : case_dtypes) {
                for (std::size_t i = 0, first = random(); i < num_memories; ++i) {
                    const Memory memory = memories[(first + i) % std::size(memories)];
                    cases.push_back(make_case(random, world, static_cast<Kind>(kind), dtype, size, memory));
                }
            }
        }
    }
    std::shuffle(cases.begin(), cases.end(), random);
    return cases;
}

void check_all(int world) {
    std::vector<Case> cases = all_cases(world);
    cases.resize(times(cases.size()));
    Host host(world);
    host.run([&](shm::Group& group) {
        std::uint64_t sequence = 0;
        for (const Case& one : cases) {
            if (run_case(group, one, ++sequence).failed()) {
                return;
            }
        }
    });
}

// Calls follow each other without anything between them. Sizes are mostly small: then a rank is
// quickest to be a call ahead.
void check_sequence(int world, unsigned seed, std::size_t count) {
    Host host(world);
    host.run([&](shm::Group& group) {
        Random random(seed), own(seed + static_cast<unsigned>(group.rank()));
        for (std::uint64_t sequence = 1; sequence <= count; ++sequence) {
            const auto kind = static_cast<Kind>(random() % num_kinds);
            const std::size_t largest = random() % 16 == 0 ? 600'000 : random() % 4 == 0 ? 20'000 : 500;
            const DType dtype = case_dtypes[random() % std::size(case_dtypes)];
            const Case one = make_case(random, world, kind, dtype, random() % largest, Memory::any);
            for (std::uint64_t i = own() % 8 == 0 ? own() % 20'000 : 0; i > 0; --i) {
                shm::pause();
            }
            if (run_case(group, one, sequence).failed()) {
                return;
            }
        }
    });
}

}  // namespace

TEST(every_collective_is_right_on_1_rank) { check_all(1); }
TEST(every_collective_is_right_on_2_ranks) { check_all(2); }
TEST(every_collective_is_right_on_3_ranks) { check_all(3); }
TEST(every_collective_is_right_on_5_ranks) { check_all(5); }
TEST(every_collective_is_right_on_8_ranks) { check_all(8); }

TEST(calls_in_a_row_are_right_on_2_ranks) { check_sequence(2, 1, times(2000)); }
TEST(calls_in_a_row_are_right_on_3_ranks) { check_sequence(3, 2, times(2000)); }
TEST(calls_in_a_row_are_right_on_5_ranks) { check_sequence(5, 3, times(2000)); }
TEST(calls_in_a_row_are_right_on_8_ranks) { check_sequence(8, 4, times(2000)); }

}  // namespace ferrodist::tests
