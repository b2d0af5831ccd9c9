// SPDX-License-Identifier: MIT OR Apache-2.0
// Where things lie in a group's block, and text that is read while it is written.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/layout.hpp"

namespace ferrodist::tests {
namespace {

using shm::GroupLayout;

struct Part {
    std::size_t start, end;
};

// All parts of a block, in order of their addresses.
std::vector<Part> parts_of(std::byte* base, std::size_t world) {
    const GroupLayout layout(base, world);
    std::vector<Part> parts;
    const auto add = [&](auto& part) {
        const auto start = static_cast<std::size_t>(reinterpret_cast<std::byte*>(&part) - base);
        CHECK_EQUAL(start % alignof(std::remove_reference_t<decltype(part)>), 0u);
        parts.push_back({start, start + sizeof(part)});
    };
    add(layout.header());
    for (std::size_t rank = 0; rank < world; ++rank) {
        add(layout.words(rank));
        for (std::size_t other = 0; other < world; ++other) {
            add(layout.queue(rank, other));
            add(layout.waited(rank, other));
        }
        add(layout.slot(rank, 0));
        add(layout.slot(rank, 1));
    }
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.start < b.start; });
    return parts;
}

}  // namespace

TEST(the_parts_of_a_groups_block_do_not_overlap_and_fit) {
    for (const std::size_t world : {1, 2, 3, 5, 8, 64, 200}) {
        shm::Arena arena(4096, 64 << 20);
        std::byte* const base = arena.base() + arena.allocate(GroupLayout::nbytes(world));
        const std::vector<Part> parts = parts_of(base, world);
        for (std::size_t i = 1; i < parts.size(); ++i) {
            CHECK(parts[i - 1].end <= parts[i].start);
        }
        CHECK_EQUAL(parts.front().start, 0u);
        CHECK_EQUAL(parts.back().end, GroupLayout::nbytes(world));
    }
}

TEST(what_different_ranks_write_is_on_different_lines) {
    CHECK_EQUAL(sizeof(shm::RankWords) % shm::line, 0u);
    CHECK(offsetof(shm::RankWords, presence) - offsetof(shm::RankWords, sleepers) >= shm::line);
    CHECK_EQUAL(sizeof(shm::Slot) % 4096, 0u);
    CHECK_EQUAL(sizeof(shm::GroupHeader) % shm::line, 0u);
}

TEST(shared_text_is_read_as_it_was_written) {
    shm::SharedText<64> text;
    CHECK_EQUAL(text.read(), "");
    for (std::size_t length = 0; length <= 64; ++length) {
        text.write(std::string(length, 'x') + "");
        CHECK_EQUAL(text.read(), std::string(length, 'x'));
    }
    text.write("short");
    CHECK_EQUAL(text.read(), "short");
}

TEST(shared_text_beyond_its_capacity_is_cut) {
    struct {
        shm::SharedText<64> text;
        std::uint64_t behind = 7;
    } memory;
    memory.text.write(std::string(64, 'a') + "bcdefghi");
    CHECK_EQUAL(memory.text.read(), std::string(64, 'a'));
    CHECK_EQUAL(memory.behind, 7u);
}

TEST(shared_text_is_never_half_of_two_texts) {
    shm::SharedText<256> text;
    std::atomic<bool> is_over{false};
    std::atomic<std::size_t> num_read{0};
    std::thread writer([&] {
        for (std::size_t i = 0; i < times(20'000) || num_read < 100; ++i) {
            text.write(std::string(i * 7 % 256, static_cast<char>('a' + i % 26)));
            if (i % 64 == 0) {
                std::this_thread::yield();  // on one core readers find the writer in the middle for ever
            }
        }
        is_over = true;
    });
    run_threads(2, [&](int) {
        while (!is_over) {
            const std::string found = text.read();
            CHECK(found.find_first_not_of(found.substr(0, 1)) == std::string::npos);
            num_read += found.empty() ? 0 : 1;
        }
    });
    writer.join();
}

TEST(every_rank_can_read_what_another_waits_in) {
    Host host(2);
    host.world(1)->report("allreduce #7");
    CHECK_EQUAL(host.world(0)->peer(1).header().report.read(), "allreduce #7");
    host.world(1)->report("");
    CHECK_EQUAL(host.world(0)->peer(1).header().report.read(), "");
}

}  // namespace ferrodist::tests
