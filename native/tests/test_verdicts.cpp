// SPDX-License-Identifier: MIT OR Apache-2.0
// The verdict on a group: given once, read by all.
#include <atomic>
#include <cstring>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/split.hpp"

namespace ferrodist::tests {
namespace {

using shm::Group;
using shm::Outcome;

}  // namespace

TEST(of_all_verdicts_at_once_one_counts) {
    for (std::size_t i = 0; i < times(300); ++i) {
        Host host(8, very_long, 1 << 20);
        std::atomic<int> num_given{0}, winner{-1}, num_ready{0};
        host.run([&](Group& group) {
            const std::string mine(1000 + static_cast<std::size_t>(group.rank()), static_cast<char>('a' + group.rank()));
            ++num_ready;
            eventually([&] { return num_ready == 8; });
            if (group.give_verdict(1, mine)) {
                ++num_given;
                winner = group.rank();
            }
            const std::string found = group.verdict(1).value_or("");
            CHECK(!found.empty() && found == std::string(1000 + static_cast<std::size_t>(found[0] - 'a'), found[0]));
        });
        CHECK_EQUAL(num_given.load(), 1);
        CHECK_EQUAL(host.group(3)->verdict(1).value_or("")[0], static_cast<char>('a' + winner));
    }
}

TEST(a_verdict_beyond_its_capacity_is_cut) {
    Host host(2);
    CHECK(host.group(1)->give_verdict(0, std::string(20'000, 'x')));
    CHECK_EQUAL(host.group(0)->verdict(0).value_or(""), std::string(16 * 1024, 'x'));
}

TEST(a_verdict_ends_the_wait_of_its_call) {
    Host host(2);
    host.run([](Group& group) {
        if (group.rank() == 1) {
            CHECK(eventually([&] { return group.words(1).sleepers.load() > 0; }));
            CHECK(group.give_verdict(4, "no"));
            return;
        }
        CHECK_EQUAL(meet_all(group, 4).outcome, Outcome::verdict);
        CHECK_EQUAL(group.verdict(4).value_or(""), "no");
    });
}

TEST(a_verdict_on_a_later_call_does_not_concern_this_one) {
    Host host(2);
    CHECK(host.group(0)->give_verdict(10, "later"));
    host.run([](Group& group) {
        CHECK(!group.has_verdict(9));
        CHECK(!group.verdict(9));
        CHECK_EQUAL(meet_all(group, 9).outcome, Outcome::done);
        CHECK(group.has_verdict(10));
        CHECK_EQUAL(meet_all(group, 10).outcome, Outcome::given_up);
        CHECK_EQUAL(meet_all(group, 11).outcome, Outcome::given_up);
    });
    CHECK_EQUAL(host.group(0)->num_rounds(), 1u);
}

TEST(a_later_verdict_lets_a_wait_go_on) {
    Host host(2);
    std::atomic<int> num_looks{0};
    host.run([&](Group& group) {
        ActingWatch watch([&] { return ++num_looks > 0; });
        if (group.rank() == 1) {
            CHECK(group.give_verdict(2, "later"));
            CHECK(eventually([&] { return num_looks >= 2; }));
        }
        CHECK_EQUAL(meet_all(group, 1, watch).outcome, Outcome::done);
    });
}

TEST(an_abort_of_the_parent_is_a_verdict_on_its_children) {
    Host host(2);
    std::vector<std::shared_ptr<Group>> children(2), grandchildren(2);
    const auto split = [](const std::shared_ptr<Group>& group, std::uint64_t id) {
        CountingWatch watch;
        shm::Split all(group, {0, 1}, id);
        CHECK(!all.wait(patience_of(watch, 0)).failed());
        return all.group();
    };
    run_threads(2, [&](int rank) {
        const auto at = static_cast<std::size_t>(rank);
        children[at] = split(host.group(rank), 1);
        grandchildren[at] = split(children[at], 2);
    });
    CHECK(children[0]->give_verdict(7, "only this group"));
    CHECK(!grandchildren[0]->has_verdict(100));
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            CHECK(eventually([&] { return grandchildren[1]->words(1).sleepers.load() > 0; }));
            CHECK(host.group(1)->give_verdict(0, "abort"));
            return;
        }
        CHECK_EQUAL(meet_all(*grandchildren[0], 1).outcome, Outcome::verdict);
    });
    CHECK_EQUAL(grandchildren[0]->verdict(1).value_or(""), "abort");
    CHECK_EQUAL(meet_all(*grandchildren[1], 1).outcome, Outcome::given_up);
    CHECK_EQUAL(children[1]->verdict(7).value_or(""), "only this group");
}

TEST(who_finds_a_verdict_half_written_waits_for_the_rest) {
    Host host(2);
    shm::VerdictBlock& block = host.group(0)->layout().header().verdict;
    block.claim = 2;  // rank 1 is writing
    std::atomic<bool> is_started{false};
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            is_started = true;
            CHECK(!host.group(0)->give_verdict(1, "mine"));
            CHECK_EQUAL(host.group(0)->verdict(5).value_or(""), "their");
            return;
        }
        CHECK(eventually([&] { return is_started.load(); }));
        CHECK(!host.group(1)->has_verdict(5));
        std::memcpy(block.bytes, "their", 5);
        block.nbytes = 5;
        block.sequence = 3;
        block.ready.store(1, std::memory_order_release);
    });
}

TEST(a_verdict_whose_writer_died_in_the_middle_is_written_by_another) {
    Host host(3);
    host.group(0)->layout().header().verdict.claim = 2;
    host.kill(1);
    CHECK(host.group(0)->give_verdict(1, "mine"));
    CHECK(!host.group(2)->give_verdict(1, "too late"));
    CHECK_EQUAL(host.group(2)->verdict(1).value_or(""), "mine");
}

TEST(two_threads_of_a_rank_give_one_verdict) {
    for (std::size_t i = 0; i < times(1000); ++i) {
        Host host(2, very_long, 1 << 20);
        std::atomic<int> num_ready{0}, num_given{0};
        run_threads(2, [&](int which) {
            const std::string mine(10'000, static_cast<char>('a' + which));
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            num_given += host.group(0)->give_verdict(1, mine) ? 1 : 0;
        });
        if (num_given != 1) {
            CHECK_EQUAL(num_given.load(), 1);
            return;
        }
    }
}

// Who has written it and gone did not die in the middle.
TEST(a_verdict_stands_though_its_writer_has_gone) {
    for (std::size_t i = 0; i < times(1000); ++i) {
        Host host(2, very_long, 1 << 20);
        std::atomic<int> num_ready{0}, num_given{0};
        run_threads(2, [&](int rank) {
            const std::string mine(8'000, static_cast<char>('a' + rank));
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            num_given += host.group(rank)->give_verdict(1, mine) ? 1 : 0;
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
