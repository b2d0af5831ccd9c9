// SPDX-License-Identifier: MIT OR Apache-2.0
// Blocks of an arena: taking them, giving them back, and what a stranger may not do.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/arena.hpp"

namespace ferrodist::tests {
namespace {

using shm::Arena;

constexpr std::size_t page = 4096;
constexpr std::size_t megabyte = 1 << 20;

std::size_t resident_nbytes(const Arena& arena) {
    struct stat facts {};
    fstat(arena.fd(), &facts);
    return static_cast<std::size_t>(facts.st_blocks) * 512;
}

}  // namespace

TEST(the_first_block_of_an_arena_is_the_reserved_one) {
    Arena arena(3 * page, megabyte);
    CHECK_EQUAL(arena.num_blocks(), 1u);
    CHECK_EQUAL(arena.allocated_nbytes(), 3 * page);
    CHECK_EQUAL(arena.allocate(1), 3 * page);
}

TEST(blocks_begin_on_pages_and_do_not_overlap) {
    Arena arena(page, 16 * megabyte);
    std::mt19937 random(1);
    std::vector<std::pair<std::size_t, std::size_t>> blocks;
    for (int i = 0; i < 100; ++i) {
        const std::size_t nbytes = random() % 100'000;
        blocks.emplace_back(arena.allocate(nbytes), nbytes);
    }
    std::sort(blocks.begin(), blocks.end());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        CHECK_EQUAL(blocks[i].first % page, 0u);
        CHECK(i == 0 || blocks[i - 1].first + std::max<std::size_t>(blocks[i - 1].second, 1) <= blocks[i].first);
    }
    CHECK_EQUAL(arena.num_blocks(), 101u);
}

TEST(sizes_are_counted_in_whole_pages) {
    Arena arena(page, megabyte);
    const std::size_t small = arena.allocate(0), large = arena.allocate(page + 1);
    CHECK_EQUAL(arena.allocated_nbytes(), 4 * page);
    arena.free(large);
    CHECK_EQUAL(arena.allocated_nbytes(), 2 * page);
    arena.free(small);
    CHECK_EQUAL(arena.allocated_nbytes(), page);
    arena.free(small);  // twice, and what never was one
    arena.free(5 * page);
    CHECK_EQUAL(arena.allocated_nbytes(), page);
    CHECK_EQUAL(arena.num_blocks(), 1u);
}

TEST(a_block_is_zero_when_it_is_taken_again) {
    Arena arena(page, megabyte);
    const std::size_t offset = arena.allocate(10 * page);
    CHECK(is_all(arena.base() + offset, 10 * page, 0));
    std::fill_n(arena.base() + offset, 10 * page, std::byte{0xAB});
    arena.free(offset);
    CHECK_EQUAL(arena.allocate(10 * page), offset);
    CHECK(is_all(arena.base() + offset, 10 * page, 0));
}

TEST(a_freed_block_gives_its_memory_back) {
    Arena arena(page, 16 * megabyte);
    const std::size_t before = resident_nbytes(arena);
    const std::size_t offset = arena.allocate(8 * megabyte);
    CHECK(resident_nbytes(arena) >= before + 8 * megabyte);
    arena.free(offset);
    CHECK_EQUAL(resident_nbytes(arena), before);
}

TEST(gaps_join_with_both_neighbours) {
    for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
        Arena arena(page, 4 * page);
        std::vector<std::size_t> blocks;
        for (int i = 0; i < 3; ++i) {
            blocks.push_back(arena.allocate(page));
        }
        for (const int which : order) {
            arena.free(blocks[static_cast<std::size_t>(which)]);
        }
        CHECK_EQUAL(arena.allocate(3 * page), page);  // only fits where all three were
    }
}

TEST(what_no_gap_can_hold_is_refused_in_words) {
    Arena arena(page, megabyte);
    CHECK_THROWS(shm::OutOfMemory, arena.allocate(megabyte), "no gap of 1 MiB is left in an arena of 1 MiB");
    CHECK_THROWS(shm::OutOfMemory, arena.allocate(std::size_t{1} << 50), "was asked for, but only");
    const std::size_t rest = arena.allocate(megabyte - page);
    CHECK_THROWS(shm::OutOfMemory, arena.allocate(1), "no gap");
    arena.free(rest);
    CHECK_EQUAL(arena.allocate(1), page);
    CHECK_EQUAL(arena.allocated_nbytes(), 2 * page);
}

TEST(find_knows_what_lies_in_the_arena) {
    Arena arena(page, megabyte);
    CHECK_EQUAL(arena.find(arena.base(), 1).value_or(7), 0u);
    CHECK_EQUAL(arena.find(arena.base() + 100, megabyte - 100).value_or(7), 100u);
    CHECK(!arena.find(arena.base() + 100, megabyte - 99));
    CHECK(!arena.find(arena.base() + megabyte, 1));
    CHECK(!arena.find(arena.base() - 1, 1));
    CHECK(!arena.find(arena.base() + 1, ~std::size_t{0}));
    CHECK(!arena.find(&arena, 1));
}

TEST(nobody_can_resize_an_arena) {
    Arena arena(page, megabyte);
    CHECK(ftruncate(arena.fd(), page) != 0);
    CHECK(ftruncate(arena.fd(), 2 * megabyte) != 0);
    CHECK(fcntl(arena.fd(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
    const shm::Mapping mapping(arena.fd());
    CHECK_EQUAL(mapping.nbytes(), megabyte);
    arena.base()[5000] = std::byte{3};
    CHECK(mapping.base()[5000] == std::byte{3});
}

TEST(a_file_that_could_shrink_is_not_mapped) {
    const int open = memfd_create("test", MFD_ALLOW_SEALING);
    CHECK(ftruncate(open, megabyte) == 0);
    CHECK_THROWS(std::runtime_error, shm::Mapping(open), "not sealed");
    close(open);
    CHECK_THROWS(std::system_error, shm::Mapping(-1), "cannot read the size");
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK_THROWS(std::runtime_error, shm::Mapping(ends[0]), "not sealed");  // knows no seals at all
    close(ends[0]);
    close(ends[1]);
}

TEST(a_forked_child_frees_nothing_of_its_parent) {
    Arena arena(page, megabyte);
    const std::size_t offset = arena.allocate(page);
    std::fill_n(arena.base() + offset, page, std::byte{0x5A});
    const pid_t child = fork();
    if (child == 0) {
        const bool is_readable = is_all(arena.base() + offset, page, 0x5A);
        arena.free(offset);
        _exit(is_readable && arena.num_blocks() == 2 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    CHECK(is_all(arena.base() + offset, page, 0x5A));
    CHECK_EQUAL(arena.allocated_nbytes(), 2 * page);
}

TEST(threads_take_and_free_blocks_at_once) {
    Arena arena(page, 64 * megabyte);
    run_threads(4, [&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank));
        std::vector<std::pair<std::size_t, std::size_t>> mine;
        for (std::size_t i = 0; i < times(4000); ++i) {
            if (mine.size() > 8 || (!mine.empty() && random() % 2 == 0)) {
                const auto [offset, nbytes] = mine.front();
                CHECK(is_all(arena.base() + offset, nbytes, rank + 1));
                arena.free(offset);
                mine.erase(mine.begin());
            } else {
                const std::size_t nbytes = 1 + random() % 20'000;
                mine.emplace_back(arena.allocate(nbytes), nbytes);
                CHECK(is_all(arena.base() + mine.back().first, nbytes, 0));
                std::fill_n(arena.base() + mine.back().first, nbytes, std::byte(rank + 1));
            }
        }
        for (const auto& block : mine) {
            arena.free(block.first);
        }
    });
    CHECK_EQUAL(arena.allocated_nbytes(), page);
    CHECK_EQUAL(arena.allocate(63 * megabyte), page);
}

TEST(a_block_that_is_taken_back_keeps_its_bytes_and_shows_nothing_that_others_write) {
    Arena arena(page, megabyte);
    const std::size_t before = arena.allocate(page), block = arena.allocate(3 * page), after = arena.allocate(page);
    const shm::Mapping others(arena.fd());
    arena.base()[block + page] = std::byte{7};
    CHECK(others.base()[block + page] == std::byte{7});
    arena.take_back(block + page);
    CHECK(arena.base()[block + page] == std::byte{7});
    others.base()[block + page] = std::byte{9};
    CHECK(arena.base()[block + page] == std::byte{7});
    CHECK(!arena.find(arena.base() + block, page));
    CHECK(!arena.find(arena.base() + block + 2 * page, page));
    for (const std::size_t neighbour : {before, after}) {
        CHECK(arena.find(arena.base() + neighbour, page));
        others.base()[neighbour] = std::byte{5};
        CHECK(arena.base()[neighbour] == std::byte{5});
    }
    arena.free(block);  // its place is not given to another block, which the others could write to
    CHECK(arena.allocate(page) > after);
}

TEST(a_block_that_users_share_is_not_taken_back) {
    Arena arena(page, megabyte);
    const std::size_t block = arena.allocate(page, true);
    arena.take_back(block);
    const shm::Mapping others(arena.fd());
    others.base()[block] = std::byte{5};
    CHECK(arena.base()[block] == std::byte{5});
}

}  // namespace ferrodist::tests
