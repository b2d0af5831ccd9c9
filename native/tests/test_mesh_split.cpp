// SPDX-License-Identifier: MIT OR Apache-2.0
// Groups that are split off over a mesh: who comes, who does not, and that nobody is harmed by either.
#include <string>

#include "check.hpp"
#include "meshes.hpp"
#include "net/split.hpp"

namespace ferrodist::tests {
namespace {

using net::Group;
using net::Split;
using core::StatusCode;
using GroupPointer = std::shared_ptr<Group>;

GroupPointer split(const GroupPointer& parent, const std::vector<int>& members, std::uint64_t identity) {
    const Wait wait;
    Split one(parent, members, identity);
    CHECK_EQUAL(one.wait(wait.options).code, StatusCode::done);
    return one.group();
}

}  // namespace

TEST(some_ranks_of_a_mesh_become_a_group) {
    Meshes meshes(5);
    run_threads(5, [&](int rank) {
        const std::vector<int> even{0, 2, 4}, odd{3, 1};  // in the order given
        const std::vector<int>& members = rank % 2 == 0 ? even : odd;
        const GroupPointer group = split(meshes.shared_group(rank), members, members.size());
        CHECK_EQUAL(group->size(), static_cast<int>(members.size()));
        CHECK_EQUAL(group->world_rank(group->rank()), rank);
        for (std::uint64_t sequence = 1; sequence <= times(50); ++sequence) {
            CHECK_EQUAL(go_round(*group, sequence, 500 * sequence).code, StatusCode::done);
        }
    });
}

TEST(groups_over_one_mesh_do_not_mix) {
    Meshes meshes(4);
    run_threads(4, [&](int rank) {
        const GroupPointer all = meshes.shared_group(rank);
        const GroupPointer three = rank == 3 ? nullptr : split(all, {2, 0, 1}, 11);
        const GroupPointer two = rank == 1 || rank == 2 ? split(three, {2, 0}, 12) : nullptr;  // of the three
        for (std::uint64_t sequence = 1; sequence <= times(50); ++sequence) {
            CHECK_EQUAL(go_round(*all, sequence).code, StatusCode::done);
            if (three != nullptr) {
                CHECK_EQUAL(go_round(*three, sequence).code, StatusCode::done);
            }
            if (two != nullptr) {
                CHECK_EQUAL(go_round(*two, 2 * sequence).code, StatusCode::done);
            }
        }
    });
}

TEST(a_group_is_split_off_again_and_again) {
    Meshes meshes(3);
    run_threads(3, [&](int rank) {
        for (std::uint64_t identity = 1; identity <= times(100); ++identity) {
            const GroupPointer group = split(meshes.shared_group(rank), {2, 1, 0}, identity);
            CHECK_EQUAL(go_round(*group, 1).code, StatusCode::done);
        }
    });
    for (int rank = 0; rank < 3; ++rank) {
        for (int peer = 0; peer < 3; ++peer) {
            CHECK(meshes.mesh(rank).invitations_of(peer).empty());
        }
    }
}

TEST(who_does_not_come_to_a_split_is_named_and_no_link_is_harmed) {
    Meshes meshes(4);
    for (int rank = 0; rank < 2; ++rank) {
        const Wait wait(soon);
        Split one(meshes.shared_group(rank), {0, 1, 2}, 5);
        CHECK_EQUAL(one.wait(wait.options).code, StatusCode::late);
        CHECK(one.absent() == (rank == 0 ? std::vector<int>{1, 2} : std::vector<int>{0, 2}));
    }
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 1).code, StatusCode::done); });
    for (int rank = 0; rank < 4; ++rank) {
        for (int peer = 0; peer < 4; ++peer) {
            CHECK_EQUAL(meshes.group(rank).flaw_of(peer), "");
        }
    }
    run_threads(3, [&](int rank) {  // all may come later, under another number
        const GroupPointer group = split(meshes.shared_group(rank), {0, 1, 2}, 6);
        CHECK_EQUAL(go_round(*group, 1).code, StatusCode::done);
    });
}

TEST(where_a_process_waits_is_known_to_all) {
    Meshes meshes(3);
    const Wait wait(soon);
    {
        Split one(meshes.shared_group(1), {1, 2}, 5);
        CHECK_EQUAL(one.wait(wait.options).code, StatusCode::late);
        for (const int rank : {0, 2}) {
            CHECK(eventually([&] { return !meshes.mesh(rank).invitations_of(1).empty(); }));
            CHECK(meshes.mesh(rank).invitations_of(1) == std::vector<std::vector<int>>({{1, 2}}));
            CHECK(meshes.mesh(rank).invitations_of(2).empty());
        }
    }
    CHECK(eventually([&] { return meshes.mesh(0).invitations_of(1).empty(); }));
}

TEST(a_member_that_died_is_lost_to_a_split) {
    Meshes meshes(3);
    run_threads(3, [&](int rank) {
        if (rank == 2) {
            meshes.kill(2);
            return;
        }
        const Wait wait;
        Split one(meshes.shared_group(rank), {2, 0, 1}, 5);
        const core::Status status = one.wait(wait.options);
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, 2);
    });
}

TEST(a_member_of_which_nothing_is_heard_is_silent_to_a_split) {
    Meshes meshes(3, {.heartbeat_timeout_ns = 300 * millisecond, .asleep = {2}});
    const Wait wait;
    Split one(meshes.shared_group(0), {0, 1, 2}, 5);
    const core::Status status = one.wait(wait.options);
    CHECK_EQUAL(status.code, StatusCode::no_heartbeat);
    CHECK_EQUAL(status.failed_rank, 2);
}

TEST(a_group_error_ends_the_wait_for_a_split) {
    Meshes meshes(3);
    const Wait wait;
    Split one(meshes.shared_group(0), {0, 1}, 5);
    meshes.group(2).set_error(0, "enough");
    CHECK_EQUAL(one.wait(wait.options).code, StatusCode::group_error);
}

TEST(a_member_that_gave_up_as_the_last_one_came_is_lost_to_the_group) {
    Meshes meshes(2, {.strangers = {1}});
    const std::vector<int> list{0, 1};
    const net::Bytes bytes = std::as_bytes(std::span(list));
    meshes.stranger(1, 0).say({.kind = net::FrameKind::join, .group = 5}, Buffer(bytes.begin(), bytes.end()));
    const GroupPointer group = split(meshes.shared_group(0), {0, 1}, 5);
    meshes.stranger(1, 0).say({.kind = net::FrameKind::unjoin, .group = 5});
    CHECK(go_round(*group, 1, 0).failed());
}

// Rank 1 has seen all come, and rank 0 has not: what rank 0 says of it stands, and rank 0 counts as alive.
TEST(a_split_that_a_member_gives_up_ends_the_group_with_its_error) {
    Meshes meshes(2);
    Split one(meshes.shared_group(0), {0, 1}, 5);
    const GroupPointer group = split(meshes.shared_group(1), {0, 1}, 5);
    one.give_up("rank 2 is lost");
    CHECK(eventually([&] { return group->own_error().has_value(); }));
    CHECK_EQUAL(go_round(*group, 1, 1).code, StatusCode::given_up);
    CHECK(group->group_error(1) == std::optional<std::string>("rank 2 is lost"));
    CHECK(group->own_error() == one.group()->own_error());
}

TEST(who_comes_to_a_split_after_a_member_gave_it_up_waits_for_that_member) {
    Meshes meshes(2);
    const Wait wait(soon);
    Split one(meshes.shared_group(0), {0, 1}, 5);
    CHECK(eventually([&] { return !meshes.mesh(1).invitations_of(0).empty(); }));
    one.give_up("rank 2 is lost");
    CHECK(eventually([&] { return meshes.mesh(1).invitations_of(0).empty(); }));
    Split two(meshes.shared_group(1), {0, 1}, 5);
    CHECK(eventually([&] { return two.absent() == std::vector<int>{0}; }));
    CHECK_EQUAL(two.wait(wait.options).code, StatusCode::late);
}

TEST(a_member_that_came_to_a_split_and_died_ends_the_wait_for_another) {
    Meshes meshes(3, {.strangers = {1}});
    const std::vector<int> list{0, 1, 2};
    const net::Bytes bytes = std::as_bytes(std::span(list));
    meshes.stranger(1, 0).say({.kind = net::FrameKind::join, .group = 5}, Buffer(bytes.begin(), bytes.end()));
    const Wait wait;
    Split one(meshes.shared_group(0), list, 5);
    eventually([&] { return one.absent() == std::vector<int>{2}; });
    meshes.stranger(1, 0).link.close();
    const core::Status status = one.wait(wait.options);
    CHECK_EQUAL(status.code, StatusCode::lost);
    CHECK_EQUAL(status.failed_rank, 1);
}

}  // namespace ferrodist::tests
