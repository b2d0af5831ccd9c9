// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory that all members of a group index, and when it goes.
#include <cstring>
#include <optional>
#include <vector>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/common_block.hpp"

namespace ferrodist::tests {
namespace {

using shm::CommonBlock;

constexpr std::size_t nbytes = 10'000;

// One block of rank 0 that every rank has opened.
std::vector<std::optional<CommonBlock>> open_everywhere(Host& host) {
    const std::uint64_t offset = CommonBlock::allocate(*host.group(0), nbytes);
    std::vector<std::optional<CommonBlock>> blocks(static_cast<std::size_t>(host.size()));
    for (int rank = 0; rank < host.size(); ++rank) {
        blocks[static_cast<std::size_t>(rank)].emplace(*host.group(rank), 0, offset, nbytes);
    }
    return blocks;
}

}  // namespace

TEST(what_a_rank_writes_into_a_common_block_all_see_after_a_round) {
    Host host(3);
    auto blocks = open_everywhere(host);
    run_threads(3, [&](int rank) {
        std::byte* data = blocks[static_cast<std::size_t>(rank)]->data();
        for (int round = 1; round < 20; ++round) {
            CHECK(data[rank] == static_cast<std::byte>(round - 1));
            data[rank] = static_cast<std::byte>(round);
            CHECK_EQUAL(meet_all(*host.group(rank), 2 * static_cast<std::uint64_t>(round)).code, core::StatusCode::done);
            for (int other = 0; other < 3; ++other) {
                CHECK(data[other] == static_cast<std::byte>(round));
            }
            CHECK_EQUAL(meet_all(*host.group(rank), 2 * static_cast<std::uint64_t>(round) + 1).code,
                        core::StatusCode::done);
        }
    });
}

TEST(a_common_block_goes_with_the_last_rank_that_drops_it) {
    for (std::size_t last = 0; last < 3; ++last) {
        Host host(3);
        const std::size_t before = host.arena(0).allocated_nbytes();
        auto blocks = open_everywhere(host);
        std::memset(blocks[last]->data(), 7, nbytes);
        for (std::size_t rank = 0; rank < 3; ++rank) {
            if (rank != last) {
                blocks[rank].reset();
            }
        }
        host.world(0)->sweep();
        CHECK(host.arena(0).allocated_nbytes() > before);
        CHECK(blocks[last]->data()[nbytes - 1] == std::byte{7});
        blocks[last].reset();
        host.world(0)->sweep();
        CHECK_EQUAL(host.arena(0).allocated_nbytes(), before);
    }
}

TEST(a_common_block_that_is_taken_again_is_zero) {
    Host host(2);
    for (int i = 0; i < 3; ++i) {
        auto blocks = open_everywhere(host);
        for (std::size_t at = 0; at < nbytes; ++at) {
            CHECK(blocks[1]->data()[at] == std::byte{0});
        }
        std::memset(blocks[0]->data(), 1, nbytes);
    }
}

TEST(a_common_block_beyond_its_owners_memory_is_refused) {
    Host host(2);
    const std::uint64_t end = host.arena(0).nbytes();
    for (const std::uint64_t offset : {end, end - nbytes, ~std::uint64_t{0}}) {
        CHECK_THROWS(std::runtime_error, CommonBlock(*host.group(1), 0, offset, nbytes), "does not lie in the memory");
    }
}

}  // namespace ferrodist::tests
