// SPDX-License-Identifier: MIT OR Apache-2.0
// The group error on a group: given once, read by all.
#include <atomic>
#include <cstring>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/split.hpp"

namespace ferrodist::tests {
namespace {

using shm::Group;
using core::StatusCode;

}  // namespace

TEST(of_all_group_errors_at_once_one_counts) {
    for (std::size_t i = 0; i < times(300); ++i) {
        Host host(8, very_long, 1 << 20);
        std::atomic<int> num_given{0}, winner{-1}, num_ready{0};
        host.run([&](Group& group) {
            const std::string mine(1000 + static_cast<std::size_t>(group.rank()), static_cast<char>('a' + group.rank()));
            ++num_ready;
            eventually([&] { return num_ready == 8; });
            if (group.set_error(1, mine)) {
                ++num_given;
                winner = group.rank();
            }
            const std::string found = group.group_error(1).value_or("");
            CHECK(!found.empty() && found == std::string(1000 + static_cast<std::size_t>(found[0] - 'a'), found[0]));
        });
        CHECK_EQUAL(num_given.load(), 1);
        CHECK_EQUAL(host.group(3)->group_error(1).value_or("")[0], static_cast<char>('a' + winner));
    }
}

TEST(a_group_error_beyond_its_capacity_is_cut) {
    Host host(2);
    CHECK(host.group(1)->set_error(0, std::string(20'000, 'x')));
    CHECK_EQUAL(host.group(0)->group_error(0).value_or(""), std::string(16 * 1024, 'x'));
}

TEST(a_group_error_ends_the_wait_of_its_call) {
    Host host(2);
    host.run([](Group& group) {
        if (group.rank() == 1) {
            CHECK(eventually([&] { return group.words(1).sleepers.load() > 0; }));
            CHECK(group.set_error(4, "no"));
            return;
        }
        CHECK_EQUAL(meet_all(group, 4).code, StatusCode::group_error);
        CHECK_EQUAL(group.group_error(4).value_or(""), "no");
    });
}

TEST(a_group_error_on_a_later_call_does_not_concern_this_one) {
    Host host(2);
    CHECK(host.group(0)->set_error(10, "later"));
    host.run([](Group& group) {
        CHECK(!group.has_error(9));
        CHECK(!group.group_error(9));
        CHECK_EQUAL(meet_all(group, 9).code, StatusCode::done);
        CHECK(group.has_error(10));
        CHECK_EQUAL(meet_all(group, 10).code, StatusCode::given_up);
        CHECK_EQUAL(meet_all(group, 11).code, StatusCode::given_up);
    });
    CHECK_EQUAL(host.group(0)->num_rounds(), 1u);
}

TEST(a_later_group_error_lets_a_wait_go_on) {
    Host host(2);
    std::atomic<int> num_polls{0};
    host.run([&](Group& group) {
        ActingHook hook([&] { return ++num_polls > 0; });
        if (group.rank() == 1) {
            CHECK(group.set_error(2, "later"));
            CHECK(eventually([&] { return num_polls >= 2; }));
        }
        CHECK_EQUAL(meet_all(group, 1, hook).code, StatusCode::done);
    });
}

TEST(an_abort_of_the_parent_is_a_group_error_on_its_children) {
    Host host(2);
    std::vector<std::shared_ptr<Group>> children(2), grandchildren(2);
    const auto split = [](const std::shared_ptr<Group>& group, std::uint64_t id) {
        CountingHook hook;
        shm::Split all(group, {0, 1}, id);
        CHECK(!all.wait(options_of(hook, 0)).failed());
        return all.group();
    };
    run_threads(2, [&](int rank) {
        const auto at = static_cast<std::size_t>(rank);
        children[at] = split(host.group(rank), 1);
        grandchildren[at] = split(children[at], 2);
    });
    CHECK(children[0]->set_error(7, "only this group"));
    CHECK(!grandchildren[0]->has_error(100));
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            CHECK(eventually([&] { return grandchildren[1]->words(1).sleepers.load() > 0; }));
            CHECK(host.group(1)->set_error(0, "abort"));
            return;
        }
        CHECK_EQUAL(meet_all(*grandchildren[0], 1).code, StatusCode::group_error);
    });
    CHECK_EQUAL(grandchildren[0]->group_error(1).value_or(""), "abort");
    CHECK_EQUAL(meet_all(*grandchildren[1], 1).code, StatusCode::given_up);
    CHECK_EQUAL(children[1]->group_error(7).value_or(""), "only this group");
}

TEST(who_finds_a_group_error_half_written_waits_for_the_rest) {
    Host host(2);
    shm::GroupErrorBlock& block = host.group(0)->layout().header().group_error;
    block.claim = 2;  // rank 1 is writing
    std::atomic<bool> is_started{false};
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            is_started = true;
            CHECK(!host.group(0)->set_error(1, "mine"));
            CHECK_EQUAL(host.group(0)->group_error(5).value_or(""), "their");
            return;
        }
        CHECK(eventually([&] { return is_started.load(); }));
        CHECK(!host.group(1)->has_error(5));
        std::memcpy(block.bytes, "their", 5);
        block.nbytes = 5;
        block.sequence = 3;
        block.ready.store(1, std::memory_order_release);
    });
}

TEST(a_group_error_whose_writer_died_in_the_middle_is_written_by_another) {
    Host host(3);
    host.group(0)->layout().header().group_error.claim = 2;
    host.kill(1);
    CHECK(host.group(0)->set_error(1, "mine"));
    CHECK(!host.group(2)->set_error(1, "too late"));
    CHECK_EQUAL(host.group(2)->group_error(1).value_or(""), "mine");
}

TEST(two_threads_of_a_rank_give_one_group_error) {
    for (std::size_t i = 0; i < times(1000); ++i) {
        Host host(2, very_long, 1 << 20);
        std::atomic<int> num_ready{0}, num_given{0};
        run_threads(2, [&](int which) {
            const std::string mine(10'000, static_cast<char>('a' + which));
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            num_given += host.group(0)->set_error(1, mine) ? 1 : 0;
        });
        if (num_given != 1) {
            CHECK_EQUAL(num_given.load(), 1);
            return;
        }
    }
}

// Who has written it and gone did not die in the middle.
TEST(a_group_error_stands_though_its_writer_has_gone) {
    for (std::size_t i = 0; i < times(1000); ++i) {
        Host host(2, very_long, 1 << 20);
        std::atomic<int> num_ready{0}, num_given{0};
        run_threads(2, [&](int rank) {
            const std::string mine(8'000, static_cast<char>('a' + rank));
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            num_given += host.group(rank)->set_error(1, mine) ? 1 : 0;
            if (rank == 1) {
                host.kill(1);
            }
        });
        if (num_given != 1) {
            CHECK_EQUAL(num_given.load(), 1);
            return;
        }
    }
}

}  // namespace ferrodist::tests
