// SPDX-License-Identifier: MIT OR Apache-2.0
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "check.hpp"
#include "core/memory.hpp"
#include "ranks.hpp"

namespace ferrodist::tests {
namespace {

constexpr std::size_t megabyte = 1 << 20;

// Fills what is kept with blocks of one size, so that a test knows what is there.
void refill_with(std::size_t nbytes) {
    std::vector<void*> blocks;
    for (std::size_t i = 0; i < most_warm / nbytes; ++i) {
        blocks.push_back(take_warm(nbytes));
    }
    for (void* const block : blocks) {
        release_warm(block);
    }
}

}  // namespace

TEST(warm_memory_is_used_again) {
    refill_with(64 * megabyte);
    void* const first = take_warm(3 * megabyte);  // rounded to 4 MB: nothing that is kept fits
    std::memset(first, 1, 3 * megabyte);
    release_warm(first);
    CHECK(take_warm(4 * megabyte) == first);
    void* const second = take_warm(4 * megabyte);
    CHECK(second != first);
    release_warm(first);
    release_warm(second);
}

TEST(warm_memory_is_not_wasted_on_a_much_smaller_array) {
    refill_with(64 * megabyte);
    const std::size_t before = warm_nbytes();
    void* const small = take_warm(32 * megabyte);
    CHECK_EQUAL(warm_nbytes(), before);
    void* const close = take_warm(52 * megabyte);
    CHECK_EQUAL(warm_nbytes(), before - 64 * megabyte);
    release_warm(close);
    release_warm(small);
}

TEST(warm_memory_keeps_no_more_than_it_may) {
    refill_with(16 * megabyte);
    CHECK_EQUAL(warm_nbytes(), most_warm);
    void* const block = take_warm(100 * megabyte);
    CHECK_EQUAL(warm_nbytes(), most_warm);
    release_warm(block);
    CHECK(warm_nbytes() <= most_warm);
    CHECK(warm_nbytes() > most_warm - 16 * megabyte);
    CHECK(take_warm(100 * megabyte) == block);  // the oldest ones went
    release_warm(block);
    void* const huge = take_warm(most_warm + megabyte);
    release_warm(huge);
    CHECK(warm_nbytes() <= most_warm);
    std::vector<unsigned char> residency((most_warm + megabyte) / 4096);
    CHECK(mincore(huge, most_warm + megabyte, residency.data()) != 0);  // not mapped any more
}

TEST(a_forked_child_gives_no_warm_memory_back) {
    void* const block = take_warm(2 * megabyte);
    std::memset(block, 7, 2 * megabyte);
    const std::size_t before = warm_nbytes();
    const pid_t child = fork();
    if (child == 0) {
        release_warm(block);
        _exit(warm_nbytes() == before && static_cast<char*>(block)[megabyte] == 7 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(static_cast<char*>(block)[megabyte], 7);
    release_warm(block);
    CHECK_EQUAL(warm_nbytes(), std::min(before + 2 * megabyte, warm_nbytes()));
}

TEST(threads_take_and_release_warm_memory_at_once) {
    run_threads(4, [](int rank) {
        for (std::size_t i = 0; i < times(2000); ++i) {
            auto* const block = static_cast<unsigned char*>(take_warm((1 + i % 4) * megabyte));
            block[0] = block[i % 4 * megabyte] = static_cast<unsigned char>(rank);
            CHECK_EQUAL(int{block[0]}, rank);
            release_warm(block);
        }
    });
    CHECK(warm_nbytes() <= most_warm);
}

}  // namespace ferrodist::tests
