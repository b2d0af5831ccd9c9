// SPDX-License-Identifier: MIT OR Apache-2.0
// Groups that are split off, and what is left of them.
#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"
#include "shm/split.hpp"

namespace ferrodist::tests {
namespace {

using core::Status;
using shm::Group;
using shm::Kind;
using core::StatusCode;
using shm::Split;
using GroupPointer = std::shared_ptr<Group>;

GroupPointer split(const GroupPointer& parent, const std::vector<int>& members, std::uint64_t id) {
    CountingHook hook;
    Split one(parent, members, id);
    CHECK_EQUAL(one.wait(options_of(hook, 0)).code, StatusCode::done);
    return one.group();
}

void talk(Group& group, std::uint64_t sequence, std::size_t nbytes) {
    Random random(sequence);
    run_case(group, make_case(random, group.size(), Kind::allreduce, DType::int64, nbytes, Memory::any), sequence);
}

std::vector<std::size_t> memory_of(Host& host) {
    std::vector<std::size_t> all;
    for (int rank = 0; rank < host.size(); ++rank) {
        all.push_back(host.arena(rank).allocated_nbytes());
    }
    return all;
}

// Twice: a group's block goes when the others have swept.
void sweep_all(Host& host) {
    for (int i = 0; i < 2 * host.size(); ++i) {
        host.world(i % host.size())->sweep();
    }
}

bool has(const std::vector<int>& list, int number) {
    return std::find(list.begin(), list.end(), number) != list.end();
}

}  // namespace

TEST(some_ranks_of_a_group_become_a_group) {
    Host host(5);
    run_threads(5, [&](int rank) {
        const std::vector<int> even{0, 2, 4}, odd{3, 1};  // in the order given
        const std::vector<int>& members = rank % 2 == 0 ? even : odd;
        const GroupPointer group = split(host.group(rank), members, members.size());
        CHECK_EQUAL(group->size(), static_cast<int>(members.size()));
        CHECK_EQUAL(group->world_rank(group->rank()), rank);
        CHECK(group->members() == members);
        for (std::uint64_t sequence = 1; sequence < 10; ++sequence) {
            talk(*group, sequence, sequence % 3 == 0 ? 300'000 : 100);
        }
    });
}

// It had come when the others looked, aborted the group around it, and took itself back.
TEST(a_first_member_that_aborts_and_goes_is_no_late_one) {
    Host host(3);
    const std::vector<int> members{0, 1, 2};
    std::optional<Split> first(std::in_place, host.group(0), members, 7), third;
    Status status;
    run_threads(2, [&](int number) {
        if (number == 0) {
            Split second(host.group(1), members, 7);
            CountingHook hook;
            status = second.wait(options_of(hook, 0));
        } else {
            // The second one waits for the third.
            CHECK(eventually([&] { return host.world(1)->peer(2).header().sleepers.load() != 0; }));
            host.group(0)->set_error(0, "aborted");
            first.reset();
            third.emplace(host.group(2), members, 7);
        }
    });
    CHECK_EQUAL(status.code, StatusCode::group_error);
}

TEST(groups_of_groups_and_their_parents_talk_in_turns) {
    Host host(5);
    run_threads(5, [&](int rank) {
        talk(*host.group(rank), 1, 100'000);
        if (rank == 1 || rank == 3) {
            talk(*host.group(rank), 2, 200);
            return;
        }
        const GroupPointer three = split(host.group(rank), {4, 2, 0}, 11);
        talk(*three, 1, 100'000);
        if (three->rank() != 1) {
            const GroupPointer two = split(three, {2, 0}, 12);
            CHECK(two->members() == (std::vector<int>{0, 4}));  // as ranks of the world
            talk(*two, 1, 100'000);
        }
        talk(*three, 2, 200);
        talk(*host.group(rank), 2, 200);
    });
}

TEST(every_pair_of_ranks_can_have_a_group) {
    Host host(5);
    const std::vector<std::size_t> before = memory_of(host);
    run_threads(5, [&](int rank) {
        std::vector<GroupPointer> groups;
        for (int a = 0; a < 5; ++a) {
            for (int b = a + 1; b < 5; ++b) {
                if (rank == a || rank == b) {
                    groups.push_back(split(host.group(rank), {a, b}, static_cast<std::uint64_t>(10 * a + b)));
                }
            }
        }
        for (const GroupPointer& group : groups) {
            talk(*group, 1, 50'000);
        }
    });
    sweep_all(host);
    CHECK(memory_of(host) == before);
}

TEST(a_member_that_never_comes_is_absent) {
    Host host(3);
    run_threads(2, [&](int rank) {
        CountingHook hook;
        Split one(host.group(rank), {0, 1, 2}, 1);
        const std::int64_t start = core::now_ns();
        // Rank 1 comes before rank 0 has given up, and waits for longer.
        CHECK_EQUAL(one.wait(options_of(hook, 0, (rank + 2) * 150 * millisecond)).code, StatusCode::late);
        CHECK(core::now_ns() - start >= (rank + 2) * 150 * millisecond);
        CHECK(core::now_ns() - start < 5 * second);
        CHECK(has(one.absent(), 2));
        CHECK(!has(one.absent(), rank));
        CHECK(!one.group());
    });
}

TEST(everybody_can_see_what_a_rank_waits_to_join) {
    Host host(3);
    CHECK(host.world(0)->invitations_of(1).empty());
    const Split one(host.group(1), {1, 2}, 5), two(host.group(1), {0, 1}, 6);
    CHECK(host.world(0)->invitations_of(1) == (std::vector<std::vector<int>>{{1, 2}, {0, 1}}));
    CHECK(host.world(0)->find_invitation(1, 6) != nullptr);
    CHECK(host.world(0)->find_invitation(1, 7) == nullptr);
    CHECK(one.absent() == std::vector<int>{2});
}

TEST(a_member_that_has_gone_is_lost_by_its_rank_in_the_parent) {
    for (const bool says_goodbye : {true, false}) {
        Host host(4);
        says_goodbye ? host.group(3)->leave("") : host.kill(3);
        CountingHook hook;
        Split one(host.group(1), {3, 1}, 1);
        const Status status = one.wait(options_of(hook, 0));
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, 3);
    }
}

TEST(a_member_that_dies_before_it_is_inside_is_lost) {
    Host host(3);
    Split dying(host.group(2), {0, 2}, 1);  // has come, but never enters
    host.kill(2);
    CountingHook hook;
    Split one(host.group(0), {0, 2}, 1);
    const Status status = one.wait(options_of(hook, 0));
    CHECK_EQUAL(status.code, StatusCode::lost);
    CHECK_EQUAL(status.failed_rank, 2);
}

TEST(an_abort_of_the_parent_ends_a_split) {
    Host host(2);
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            CHECK(eventually([&] { return host.world(1)->peer(1).header().sleepers.load() > 0; }));
            host.group(1)->set_error(0, "abort");
            return;
        }
        CountingHook hook;
        Split one(host.group(0), {0, 1}, 1);
        CHECK_EQUAL(one.wait(options_of(hook, 0)).code, StatusCode::group_error);
    });
}

TEST(a_hook_ends_a_split) {
    Host host(2);
    ActingHook hook([] { return false; });
    Split one(host.group(0), {0, 1}, 1);
    CHECK_EQUAL(one.wait(options_of(hook, 0)).code, StatusCode::interrupted);
}

TEST(too_many_splits_at_once_are_refused) {
    Host host(1);
    const std::vector<std::size_t> before = memory_of(host);
    {
        std::vector<std::unique_ptr<Split>> splits;
        for (std::uint64_t id = 1; id <= shm::ArenaHeader::num_invitations; ++id) {
            splits.push_back(std::make_unique<Split>(host.group(0), std::vector<int>{0}, id));
        }
        CHECK_THROWS(std::runtime_error, Split(host.group(0), {0}, 1000), "too many groups");
        splits.pop_back();
        Split(host.group(0), {0}, 1000);
    }
    CHECK(memory_of(host) == before);
}

// -- what is left ------------------------------------------------------------------------------------

TEST(the_memory_of_a_group_comes_back_when_all_have_dropped_it) {
    Host host(3);
    const std::vector<std::size_t> before = memory_of(host);
    std::vector<GroupPointer> groups(3);
    run_threads(3, [&](int rank) {
        GroupPointer& mine = groups[static_cast<std::size_t>(rank)];
        mine = split(host.group(rank), {0, 1, 2}, 1);
        Random random(1);  // private memory: every rank takes a stage
        run_case(*mine, make_case(random, 3, Kind::allreduce, DType::int64, 100'000, Memory::all_private), 1);
    });
    const std::vector<std::size_t> inside = memory_of(host);
    for (const std::size_t dropped : {0, 2}) {
        groups[dropped].reset();
        sweep_all(host);
        CHECK(memory_of(host) == inside);  // somebody may still look
    }
    groups[1].reset();
    sweep_all(host);
    CHECK(memory_of(host) == before);
}

TEST(the_memory_of_a_group_comes_back_when_a_member_has_died) {
    Host host(3);
    const std::vector<std::size_t> before = memory_of(host);
    std::vector<GroupPointer> groups(3);
    run_threads(3, [&](int rank) { groups[static_cast<std::size_t>(rank)] = split(host.group(rank), {0, 1, 2}, 1); });
    groups[0].reset();
    groups[1].reset();
    sweep_all(host);
    CHECK(host.arena(0).allocated_nbytes() > before[0]);
    host.kill(2);
    sweep_all(host);
    CHECK_EQUAL(host.arena(0).allocated_nbytes(), before[0]);
}

TEST(a_thousand_groups_leave_nothing_behind) {
    Host host(3);
    const std::vector<std::size_t> before = memory_of(host);
    const std::size_t num_blocks = host.arena(0).num_blocks();
    run_threads(3, [&](int rank) {
        Random random(5);
        GroupPointer kept;
        for (std::uint64_t id = 1; id <= times(1000); ++id) {
            std::vector<int> members{0, 1, 2};
            std::shuffle(members.begin(), members.end(), random);
            members.resize(1 + random() % 3);
            if (has(members, rank)) {
                GroupPointer group = split(host.group(rank), members, id);
                talk(*group, 1, id % 10 == 0 ? 20'000 : 64);
                if (id % 3 == 0) {
                    kept = std::move(group);
                }
            }
        }
    });
    sweep_all(host);
    CHECK(memory_of(host) == before);
    CHECK_EQUAL(host.arena(0).num_blocks(), num_blocks);
}

// They write into it: they publish, and they leave.
TEST(the_block_of_a_split_that_failed_is_nobody_elses_while_members_are_inside) {
    Host host(3);
    std::optional<Split> third;
    std::shared_ptr<Group> inside;
    std::thread joins([&] {
        CountingHook hook;
        Split mine(host.group(1), {0, 1, 2}, 1);
        CHECK(mine.wait(options_of(hook, 0, 10 * second)).failed());
        inside = mine.group();
    });
    std::size_t block = 0;
    {
        Split first(host.group(0), {0, 1, 2}, 1);
        ActingHook hook([&] {  // the last member comes just as the first gives up
            const shm::Invitation* const mine = host.world(0)->find_invitation(0, 1);
            block = mine->block;
            third.emplace(host.group(2), std::vector<int>{0, 1, 2}, 1);
            const shm::GroupLayout layout(host.arena(0).base() + block, 3);
            return !eventually([&] { return layout.slot(1, 0).epoch.load() == 1; });
        });
        CHECK_EQUAL(first.wait(options_of(hook, 0)).code, StatusCode::interrupted);
    }
    const std::size_t nbytes = shm::GroupLayout::nbytes(3);
    const std::size_t array = host.arena(0).allocate(nbytes);
    std::fill_n(host.arena(0).base() + array, nbytes, std::byte{0x11});
    joins.join();
    inside.reset();  // leaves
    CHECK(array != block || is_all(host.arena(0).base() + array, nbytes, 0x11));
}

TEST(the_block_of_a_group_comes_back_when_a_member_has_closed_its_world) {
    Host host(3);
    const std::size_t before = host.arena(0).allocated_nbytes();
    std::vector<std::shared_ptr<Group>> groups(3);
    run_threads(3, [&](int rank) {
        CountingHook hook;
        Split one(host.group(rank), {0, 1, 2}, 1);
        CHECK(!one.wait(options_of(hook, 0)).failed());
        groups[static_cast<std::size_t>(rank)] = one.group();
    });
    groups[1].reset();  // cannot be swept yet: rank 2 is inside
    host.close(1);
    groups[2].reset();
    groups[0].reset();
    for (const int rank : {2, 0, 2, 0}) {
        host.world(rank)->sweep();
    }
    CHECK_EQUAL(host.arena(0).allocated_nbytes(), before);
}

TEST(the_memory_of_a_split_that_failed_comes_back) {
    Host host(3);
    const std::size_t before = host.arena(0).allocated_nbytes();
    run_threads(2, [&](int rank) {
        CountingHook hook;
        shm::Split one(host.group(rank), {0, 1, 2}, 1);
        CHECK_EQUAL(one.wait(options_of(hook, 0, 100 * millisecond)).code, core::StatusCode::late);
    });
    for (const int rank : {1, 2, 0, 1, 2, 0}) {
        host.world(rank)->sweep();
    }
    CHECK_EQUAL(host.arena(0).allocated_nbytes(), before);
}

}  // namespace ferrodist::tests
