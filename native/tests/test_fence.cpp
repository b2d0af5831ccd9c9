// SPDX-License-Identifier: MIT OR Apache-2.0
// The fence: a rank that was lost, and continues, uses nothing of a rank that has gone on without it.
#include <atomic>

#include "check.hpp"
#include "ranks.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::tests {
namespace {

using core::StatusCode;
using shm::Group;

}  // namespace

TEST(a_fenced_rank_that_has_not_entered_the_call_can_no_longer) {
    Host host(2);
    host.run([](Group& group) { CHECK_EQUAL(meet_all(group, 1).code, StatusCode::done); });
    Group &survivor = *host.group(0), &lost = *host.group(1);
    ActingHook hook([&] { return !survivor.set_error(2, "lost"); });
    CHECK(meet_all(survivor, 2, hook).failed());
    CHECK(!survivor.fence(1));
    CHECK(!lost.publish());
    CHECK(!survivor.fence(1));  // and once more
}

TEST(a_rank_that_has_entered_the_call_is_inside_until_it_is_seen_to_leave) {
    Host host(3);
    Group& survivor = *host.group(0);
    const std::uint32_t before = survivor.round();
    // All have come to the first round; then rank 1 is stopped, and rank 0 gives the call up in the next one.
    for (int rank = 0; rank < 3; ++rank) {
        host.group(rank)->begin_call();
        CHECK(host.group(rank)->publish());
        host.group(rank)->next_round();
    }
    CHECK(survivor.publish());
    CHECK_EQUAL(survivor.round(), before + 1);
    survivor.set_error(1, "lost");
    CHECK(survivor.fence(1));
    CHECK(survivor.fence(2));
    host.group(2)->leave_call();
    CHECK(!survivor.fence(2));
    CHECK(survivor.fence(1));
    CHECK(!host.group(1)->publish());
}

TEST(a_rank_that_fences_comes_to_no_further_round_itself) {
    Host host(2);
    Group& survivor = *host.group(0);
    CHECK(host.group(1)->publish());  // is in a call that the survivor has not made
    survivor.set_error(1, "lost in another group");
    CHECK(!survivor.fence(1));
    CHECK(!survivor.publish());
    CHECK_EQUAL(meet_all(survivor, 1).code, StatusCode::given_up);
}

// It may be slow, and read the last round that the survivor came to when that one has long gone on.
TEST(a_rank_that_is_a_round_behind_still_finds_that_the_survivor_had_come) {
    for (const std::uint32_t num_rounds : {1u, 2u, 5u}) {
        Host host(3);
        const auto all_come = [&] {
            for (int rank = 0; rank < 3; ++rank) {
                CHECK(host.group(rank)->publish());
            }
        };
        for (std::uint32_t round = 1; round < num_rounds; ++round) {
            all_come();
            for (int rank = 0; rank < 3; ++rank) {
                host.group(rank)->next_round();
            }
        }
        all_come();
        Group &survivor = *host.group(0), &slow = *host.group(2);
        survivor.next_round();
        CHECK(survivor.publish());
        survivor.set_error(2, "rank 1 was lost in the second call");
        survivor.fence(1);
        CHECK(!slow.is_missing(0));
        CHECK(!slow.bar_missing());  // nobody is missing in its round
        core::ProgressHook hook;
        CHECK_EQUAL(slow.await_others(options_of(hook, 1, 100 * millisecond)).code, StatusCode::done);
        survivor.next_round();
        CHECK(!survivor.publish());
    }
}

TEST(a_rank_that_has_finished_its_call_has_nothing_to_fence) {
    Host host(2);
    host.run([](Group& group) { CHECK_EQUAL(meet_all(group, 1).code, StatusCode::done); });
    host.group(0)->set_error(2, "lost");
    CHECK(!host.group(0)->fence(1));
}

// Another thread of the survivor comes to a call at the same moment: then the lost rank is seen inside, or it is not in.
TEST(a_call_of_another_thread_is_seen_by_the_fence_or_does_not_happen) {
    for (std::size_t i = 0; i < times(2'000); ++i) {
        Host host(2, very_long, 1 << 20);
        Group &survivor = *host.group(0), &lost = *host.group(1);
        CHECK(lost.publish());
        std::atomic<int> num_ready{0};
        bool is_inside = false, has_come = false;
        run_threads(2, [&](int number) {
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            if (number == 0) {
                is_inside = survivor.fence(1);
            } else {
                survivor.begin_call();
                has_come = survivor.publish();
            }
        });
        if (is_inside != has_come) {
            CHECK_EQUAL(is_inside, has_come);
            return;
        }
    }
}

}  // namespace ferrodist::tests
