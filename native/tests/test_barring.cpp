// SPDX-License-Identifier: MIT OR Apache-2.0
// At the deadline a rank that has not come is barred, or has come: never both, and all find the same.
#include <atomic>
#include <optional>
#include <vector>

#include "check.hpp"
#include "core/process.hpp"
#include "ranks.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::tests {
namespace {

using shm::Group;
using core::StatusCode;

// The ranks that are barred from the current round, as a rank sees them.
std::vector<int> missing_of(const Group& group) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group.size(); ++rank) {
        if (group.is_missing(rank)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

}  // namespace

// Whichever is first, the bar or the rank: the other sees it. Some of both have to happen to mean something.
TEST(a_rank_is_barred_or_comes_but_never_both) {
    std::optional<Host> host;
    std::size_t num_barred = 0, num_come = 0;
    for (std::size_t round = 0; round < times(5'000); ++round) {
        if (!host) {
            host.emplace(2, very_long, 1 << 20);
        }
        Group &waiting = *host->group(0), &late = *host->group(1);
        std::atomic<int> num_ready{0};
        bool finds_barred = false, has_come = false;
        CHECK(waiting.publish());
        run_threads(2, [&](int number) {
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            number == 0 ? void(finds_barred = waiting.bar_missing()) : void(has_come = late.publish());
        });
        if (finds_barred == has_come) {
            CHECK(finds_barred != has_come);
            return;
        }
        CHECK(waiting.is_missing(1) == finds_barred);
        CHECK(!late.is_missing(0));
        ++(has_come ? num_come : num_barred);
        waiting.next_round();
        late.next_round();
        if (finds_barred) {
            late.next_round();
            CHECK(!late.publish());  // that slot is barred for good
            host.reset();
        }
    }
    CHECK(num_come > 0);
    CHECK(num_barred > 0 || times(5'000) < 5'000);
}

// Two whose deadlines are over at once bar the ranks they find missing: both find the same ranks.
TEST(all_who_bar_find_the_same_ranks_missing) {
    constexpr int world = 6;
    for (std::size_t i = 0; i < times(300); ++i) {
        Host host(world, very_long, 1 << 20);
        std::atomic<int> num_ready{0};
        std::vector<std::vector<int>> found(2);
        std::vector<char> has_come(world, 0);
        host.run([&](Group& group) {
            ++num_ready;
            eventually([&] { return num_ready == world; });
            const auto rank = static_cast<std::size_t>(group.rank());
            has_come[rank] = group.publish() ? 1 : 0;
            if (rank < 2) {
                group.bar_missing();
                found[rank] = missing_of(group);
            }
        });
        std::vector<int> expected;
        for (int rank = 0; rank < world; ++rank) {
            if (has_come[static_cast<std::size_t>(rank)] == 0) {
                expected.push_back(rank);
            }
        }
        for (std::size_t rank = 0; rank < 2; ++rank) {
            if (has_come[rank] != 0 && found[rank] != expected) {
                CHECK(found[rank] == expected);
                return;
            }
        }
    }
}

// The whole call, with all the ways to wait: all ranks are done, or those in it are late and name those that are not.
TEST(at_the_deadline_a_call_is_done_on_all_ranks_or_on_none) {
    constexpr int world = 3;
    for (std::size_t i = 0; i < times(300); ++i) {
        Host host(world, very_long, 1 << 20);
        std::vector<StatusCode> codes(world);
        std::atomic<int> num_ready{0};
        const std::int64_t timeout = 2 * millisecond;
        host.run([&](Group& group) {
            ++num_ready;
            eventually([&] { return num_ready == world; });
            if (group.rank() == 2) {
                const std::int64_t end = core::now_ns() + timeout * static_cast<std::int64_t>(90 + i % 30) / 100;
                eventually([&] { return core::now_ns() >= end; });
            }
            codes[static_cast<std::size_t>(group.rank())] = meet_all(group, 1, timeout).code;
        });
        if (codes == std::vector<StatusCode>(world, StatusCode::done)) {
            continue;
        }
        std::vector<int> barred;
        for (int rank = 0; rank < world; ++rank) {
            if (codes[static_cast<std::size_t>(rank)] == StatusCode::given_up) {
                barred.push_back(rank);
            }
        }
        CHECK(!barred.empty());
        for (int rank = 0; rank < world; ++rank) {
            const StatusCode code = codes[static_cast<std::size_t>(rank)];
            CHECK(code == StatusCode::given_up || code == StatusCode::late);
            CHECK(code == StatusCode::given_up || missing_of(*host.group(rank)) == barred);
        }
    }
}

TEST(a_barred_rank_that_was_in_the_call_is_told_so) {
    Host host(2);
    host.run([](Group& group) {
        CHECK_EQUAL(meet_all(group, 1).code, StatusCode::done);
        CHECK(group.have_all_entered(1));
    });
    CHECK(host.group(0)->publish());
    CHECK(host.group(0)->bar_missing());
    CountingHook hook;
    CHECK_EQUAL(host.group(1)->meet(options_of(hook, 1)).code, StatusCode::group_error);
    CHECK_EQUAL(host.group(1)->meet(options_of(hook, 2)).code, StatusCode::given_up);
}

// All are in the call, and one keeps moving: the deadline of the other is over for long before it is done.
TEST(a_call_in_which_bytes_move_outlives_its_deadline) {
    Host host(2);
    constexpr std::int64_t pace = core::stall_ns / 4;
    host.run([&](Group& group) {
        CHECK_EQUAL(meet_all(group, 1).code, StatusCode::done);
        CountingHook hook;
        if (group.rank() == 0) {
            CHECK_EQUAL(group.meet(options_of(hook, 1, millisecond)).code, StatusCode::done);
            return;
        }
        const std::int64_t end = core::now_ns() + 3 * core::stall_ns;
        for (std::int64_t next = 0; core::now_ns() < end;) {
            if (core::now_ns() >= next) {
                group.note_move();
                next = core::now_ns() + pace;
            }
        }
        CHECK_EQUAL(group.meet(options_of(hook, 1)).code, StatusCode::done);
    });
}

TEST(a_call_in_which_nothing_moves_ends_and_names_who_is_waited_for) {
    Host host(2);
    host.run([](Group& group) { CHECK_EQUAL(meet_all(group, 1).code, StatusCode::done); });
    CountingHook hook;
    CHECK_EQUAL(host.group(0)->meet(options_of(hook, 1, millisecond)).code, StatusCode::late);
    CHECK(missing_of(*host.group(0)) == std::vector<int>{1});
}

TEST(another_thread_of_a_rank_ends_a_call_that_has_no_deadline) {
    Host host(2);
    run_threads(2, [&](int number) {
        if (number == 0) {
            CHECK_EQUAL(meet_all(*host.group(0), 3).code, StatusCode::group_error);
            return;
        }
        CHECK(eventually([&] { return host.group(0)->words(1).sleepers.load() > 0; }));
        core::ProgressHook nobody;
        CHECK_EQUAL(host.group(0)->expire({&nobody}).code, StatusCode::late);
        CHECK(host.group(0)->set_error(3, "late"));
    });
    CHECK_EQUAL(meet_all(*host.group(1), 3).code, StatusCode::given_up);
}

// -- the patience of a deadline that nobody chose ------------------------------------------------------------

namespace {

// A wait whose deadline is over soon, and that then is patient with who is not held for a tenth of a second.
core::WaitOptions patient(core::ProgressHook& hook, std::int64_t longest_ns) {
    core::WaitOptions options = options_of(hook, 1, millisecond);
    options.patience = {longest_ns, 100 * millisecond};
    return options;
}

}  // namespace

TEST(a_rank_that_is_alive_is_waited_for_beyond_the_deadline) {
    Host host(2);
    std::atomic<int> num_polls{0};
    host.run([&](Group& group) {
        ActingHook hook([&] { return ++num_polls > 0; });
        if (group.rank() == 1) {
            CHECK(eventually([&] { return num_polls > 5; }));
        }
        CHECK_EQUAL(group.meet(patient(hook, very_long)).code, StatusCode::done);
    });
    CHECK(num_polls > 5);
}

TEST(a_rank_that_is_held_in_another_call_is_not_waited_for) {
    Host host(2);
    CountingHook hook;
    core::HeldThread elsewhere;
    elsewhere.note();
    CHECK_EQUAL(host.group(0)->meet(patient(hook, very_long)).code, StatusCode::late);
    CHECK(missing_of(*host.group(0)) == std::vector<int>{1});
    CHECK(core::longest_hold_ns() >= 100 * millisecond);
    CHECK_EQUAL(host.group(1)->meet(patient(hook, very_long)).code, StatusCode::given_up);
}

TEST(patience_ends) {
    Host host(2);
    CountingHook hook;
    const std::int64_t start = core::now_ns();
    CHECK_EQUAL(host.group(0)->meet(patient(hook, 300 * millisecond)).code, StatusCode::late);
    CHECK(core::now_ns() - start >= 300 * millisecond);
    CHECK(missing_of(*host.group(0)) == std::vector<int>{1});
}

TEST(an_exact_deadline_of_another_thread_ends_a_call_that_is_patient) {
    Host host(2);
    run_threads(2, [&](int number) {
        CountingHook hook;
        if (number == 0) {
            CHECK_EQUAL(host.group(0)->meet(patient(hook, very_long)).code, StatusCode::group_error);
            return;
        }
        CHECK(eventually([&] { return host.group(0)->words(1).sleepers.load() > 0; }));
        CHECK_EQUAL(host.group(0)->expire(patient(hook, very_long)).code, StatusCode::done);
        CHECK_EQUAL(host.group(0)->expire(options_of(hook, 1, millisecond)).code, StatusCode::late);
        CHECK(host.group(0)->set_error(1, "late"));
    });
}

}  // namespace ferrodist::tests
