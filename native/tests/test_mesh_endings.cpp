// SPDX-License-Identifier: MIT OR Apache-2.0
// Calls that cannot succeed: ranks that differ, are late, lost, silent or say what cannot be right, and
// the one group error that all get.
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "check.hpp"
#include "meshes.hpp"
#include "requests.hpp"

namespace ferrodist::tests {
namespace {

using net::FrameKind;
using net::Group;
using core::StatusCode;

core::Status receive_piece(Group& group, std::uint64_t sequence, int from, std::int64_t timeout_ns = very_long) {
    Buffer here(100);
    return trade(group, {.sequence = sequence, .from = from, .in = here}, timeout_ns);
}

std::string descriptor_of(int rank) { return "call of rank " + std::to_string(rank); }

// Whether a rank has come to its third call.
bool is_inside(Group& group) { return group.last_call(group.rank()).first == 3; }

// What all ranks say of a call that they differ in.
core::Status exchange_descriptors(Group& group, std::uint64_t sequence, std::vector<std::string>& descriptors) {
    const Wait wait;
    return group.exchange_descriptors(sequence, bytes_of(descriptor_of(group.rank())), wait.options, descriptors);
}

void check_all_heard(Group& group, std::uint64_t sequence) {
    std::vector<std::string> descriptors;
    CHECK_EQUAL(exchange_descriptors(group, sequence, descriptors).code, StatusCode::done);
    CHECK_EQUAL(descriptors.size(), static_cast<std::size_t>(group.size()));
    for (std::size_t rank = 0; rank < descriptors.size(); ++rank) {
        CHECK_EQUAL(descriptors[rank], descriptor_of(static_cast<int>(rank)));
    }
}

}  // namespace

// -- differences ------------------------------------------------------------------------------------

TEST(ranks_that_differ_in_a_call_all_hear_it_and_go_on) {
    Meshes meshes(4);
    meshes.run([](Group& group) {
        for (std::uint64_t sequence = 1; sequence <= times(20); ++sequence) {
            const int odd_one = static_cast<int>(sequence % 4);
            const std::uint64_t fingerprint = group.rank() == odd_one ? 2 : 1;
            const int right = (group.rank() + 1) % 4, left = (group.rank() + 3) % 4;
            Buffer out(1000), in(1000);
            core::Status status;
            for (int step = 0; step < 4 && !status.failed(); ++step) {
                status = trade(group, {sequence, right, out, left, in, fingerprint});
            }
            CHECK_EQUAL(status.code, StatusCode::mismatch);
            check_all_heard(group, sequence);
        }
        CHECK_EQUAL(go_round(group, 100).code, StatusCode::done);
    });
}

TEST(ranks_that_differ_and_wait_for_each_other_without_a_word_are_found_by_their_coordinator) {
    Meshes meshes(3);
    meshes.run([](Group& group) {  // each waits for a piece that nobody sends
        Buffer here(10);
        const Trade what{.sequence = 1, .from = (group.rank() + 1) % 3, .in = here,
                         .fingerprint = static_cast<std::uint64_t>(group.rank() == 2 ? 8 : 7)};
        CHECK_EQUAL(trade(group, what).code, StatusCode::mismatch);
        check_all_heard(group, 1);
    });
}

TEST(long_descriptors_are_heard_whole) {
    Meshes meshes(2);
    const std::string text(3 << 20, 'x');
    meshes.run([&](Group& group) {
        const Wait wait;
        std::vector<std::string> descriptors;
        CHECK_EQUAL(group.exchange_descriptors(1, bytes_of(text), wait.options, descriptors).code, StatusCode::done);
        CHECK(descriptors == std::vector<std::string>(2, text));
    });
}

TEST(a_rank_that_dies_while_all_tell_their_calls_is_lost_to_the_coordinator_who_tells_the_others) {
    Meshes meshes(3, {.strangers = {2}});
    run_threads(3, [&](int rank) {
        if (rank == 2) {
            meshes.stranger(2, 0).hear(FrameKind::ask);
            meshes.kill(2);
            return;
        }
        std::vector<std::string> descriptors;
        const core::Status status = exchange_descriptors(meshes.group(rank), 1, descriptors);
        CHECK_EQUAL(status.code, rank == 0 ? StatusCode::lost : StatusCode::group_error);
        CHECK_EQUAL(status.failed_rank, rank == 0 ? 2 : -1);
        meshes.group(rank).set_error(1, "rank 2 is lost");
    });
}

TEST(a_coordinator_that_dies_while_all_tell_their_calls_is_lost) {
    Meshes meshes(3, {.strangers = {0}});
    run_threads(3, [&](int rank) {
        if (rank == 0) {
            meshes.stranger(0, 1).hear(FrameKind::differ);
            meshes.kill(0);
            return;
        }
        std::vector<std::string> descriptors;
        const core::Status status = exchange_descriptors(meshes.group(rank), 1, descriptors);
        CHECK(status.code == StatusCode::lost || status.code == StatusCode::group_error);
        meshes.group(rank).set_error(1, "rank 0 is lost");
    });
}

TEST(a_piece_of_another_size_is_not_taken) {
    Meshes meshes(2);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1, .to = 1, .out = Buffer(10)}).code, StatusCode::done);
    Buffer here(11);
    const core::Status status = trade(meshes.group(1), {.sequence = 1, .from = 0, .in = here});
    CHECK_EQUAL(status.code, StatusCode::corrupt);
    CHECK_EQUAL(status.failed_rank, 0);
}

// -- group errors ---------------------------------------------------------------------------------------

TEST(the_first_group_error_on_a_call_is_the_one_that_all_get) {
    for (std::size_t i = 0; i < times(20); ++i) {
        Meshes meshes(4);
        std::vector<std::string> found(4);
        meshes.run([&](Group& group) {
            group.set_error(5, "of rank " + std::to_string(group.rank()));
            found[static_cast<std::size_t>(group.rank())] = group.group_error(5).value_or("none");
        });
        CHECK(found == std::vector<std::string>(4, found[0]));
        CHECK_EQUAL(found[0].substr(0, 8), "of rank ");
        for (int rank = 0; rank < 4; ++rank) {
            meshes.group(rank).set_error(5, "too late");
            meshes.group(rank).set_error(6, "settled already");
            CHECK_EQUAL(meshes.group(rank).group_error(6).value_or("none"), found[0]);
        }
    }
}

TEST(a_group_error_ends_the_waits_of_its_call_and_of_later_ones) {
    Meshes meshes(3);
    run_threads(3, [&](int rank) {
        if (rank == 1) {
            CHECK(eventually([&] { return is_inside(meshes.group(0)) && is_inside(meshes.group(2)); }));
            meshes.group(1).set_error(3, "enough");
            return;
        }
        CHECK_EQUAL(receive_piece(meshes.group(rank), 3, 1).code, StatusCode::group_error);
    });
    for (int rank = 0; rank < 3; ++rank) {
        CHECK_EQUAL(meshes.group(rank).group_error(3).value_or("none"), "enough");
        CHECK(!meshes.group(rank).group_error(2).has_value());
        CHECK_EQUAL(receive_piece(meshes.group(rank), 4, (rank + 1) % 3).code, StatusCode::given_up);
    }
}

TEST(a_call_before_that_of_a_group_error_goes_on) {
    Meshes meshes(2);
    meshes.group(1).set_error(3, "of a later call");
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 2).code, StatusCode::done); });
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 3).code, StatusCode::given_up); });
}

TEST(when_the_coordinator_is_gone_the_next_rank_keeps_the_group_errors) {
    Meshes meshes(4);
    meshes.kill(0);
    std::vector<std::string> found(4);
    meshes.run([&](Group& group) {
        group.set_error(1, "of rank " + std::to_string(group.rank()));
        found[static_cast<std::size_t>(group.rank())] = group.group_error(1).value_or("none");
    });
    CHECK_EQUAL(found[2], found[1]);
    CHECK_EQUAL(found[3], found[1]);
}

TEST(a_proposal_that_died_with_its_coordinator_goes_to_the_next_one) {
    Meshes meshes(3, {.strangers = {0}});
    run_threads(2, [&](int number) {
        if (number == 0) {
            meshes.stranger(0, 2).hear(FrameKind::propose);
            meshes.kill(0);
            return;
        }
        meshes.group(2).set_error(1, "mine");
        CHECK_EQUAL(meshes.group(2).group_error(1).value_or("none"), "mine");
    });
    CHECK(eventually([&] { return meshes.group(1).group_error(1).has_value(); }));
    CHECK_EQUAL(*meshes.group(1).group_error(1), "mine");
}

TEST(a_coordinator_that_does_not_answer_does_not_hold_a_group_error_up) {
    Meshes meshes(2, {.asleep = {0}});
    meshes.group(1).set_error(1, "mine");  // after a second
    CHECK_EQUAL(meshes.group(1).group_error(1).value_or("none"), "mine");
}

TEST(a_group_error_of_the_group_around_is_one_of_this_group) {
    Meshes meshes(2);
    std::vector<std::shared_ptr<Group>> inner;
    for (int rank = 0; rank < 2; ++rank) {
        const net::Lock guard = meshes.mesh(rank).lock();
        inner.push_back(std::make_shared<Group>(meshes.shared_group(rank)->shared_mesh(), 9, std::vector<int>{1, 0},
                                                meshes.shared_group(rank)));
    }
    meshes.group(0).set_error(0, "all is over");
    CHECK(receive_piece(*inner[1], 1, 0).failed());
    CHECK_EQUAL(inner[0]->group_error(1).value_or("none"), "all is over");
}

// -- waits that end ---------------------------------------------------------------------------------

TEST(a_call_that_waits_in_vain_is_late) {
    Meshes meshes(2);
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, 1, soon).code, StatusCode::late);
    CHECK(meshes.group(0).has_barred());
    CHECK_EQUAL(receive_piece(meshes.group(1), 1, 0, soon).code, StatusCode::given_up);
    CHECK_EQUAL(receive_piece(meshes.group(1), 2, 0, soon).code, StatusCode::given_up);
}

TEST(a_hook_may_end_a_wait) {
    Meshes meshes(2);
    ActingHook hook([] { return false; });
    Buffer here(1);
    const core::WaitOptions options{&hook, 0, core::no_spins};
    const net::Task task{nullptr, nullptr, false, 1, 1};
    CHECK_EQUAL(net::exchange(meshes.group(0), 1, -1, {}, 1, here.data(), 1, task, options).code,
                StatusCode::interrupted);
}

TEST(a_rank_that_dies_is_lost_to_all_that_wait_for_it) {
    Meshes meshes(3);
    run_threads(3, [&](int rank) {
        if (rank == 2) {
            CHECK(eventually([&] { return meshes.group(0).last_call(0).first == 1; }));
            meshes.kill(2);
            return;
        }
        const core::Status status = receive_piece(meshes.group(rank), 1, 2);
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, 2);
    });
    CHECK(meshes.group(0).flaw_of(2).find("connection") != std::string::npos);
    CHECK_EQUAL(meshes.group(0).flaw_of(1), "");
}

TEST(what_a_rank_has_sent_before_it_died_still_counts) {
    Meshes meshes(2);
    const Buffer sent = random_bytes(50'000, 1);
    CHECK_EQUAL(trade(meshes.group(1), {.sequence = 1, .to = 0, .out = sent}).code, StatusCode::done);
    meshes.kill(1);
    Buffer here(50'000);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1, .from = 1, .in = here}).code, StatusCode::done);
    CHECK(here == sent);
    CHECK_EQUAL(receive_piece(meshes.group(0), 2, 1).code, StatusCode::lost);
}

TEST(a_rank_of_which_nothing_is_heard_is_silent) {
    Meshes meshes(3, {.heartbeat_timeout_ns = 300 * millisecond, .asleep = {1}});
    const core::Status status = receive_piece(meshes.group(0), 1, 2);  // waits for another one
    CHECK_EQUAL(status.code, StatusCode::no_heartbeat);
    CHECK_EQUAL(status.failed_rank, 1);
    Buffer here(10);
    CHECK_EQUAL(receive(meshes.group(2).messages(), 1, 0, here).code, StatusCode::no_heartbeat);
}

TEST(ranks_that_do_not_call_are_not_silent) {
    Meshes meshes(3, {.heartbeat_timeout_ns = 300 * millisecond});
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, 2, second).code, StatusCode::late);
}

TEST(bytes_that_cannot_be_right_name_whose_they_are) {
    Meshes meshes(3, {.strangers = {1}});
    const Buffer noise = random_bytes(1000, 1);
    CHECK_EQUAL(::send(meshes.stranger(1, 0).link.socket(), noise.data(), noise.size(), 0), 1000);
    const core::Status status = receive_piece(meshes.group(0), 1, 1);
    CHECK_EQUAL(status.code, StatusCode::corrupt);
    CHECK_EQUAL(status.failed_rank, 1);
    CHECK_EQUAL(meshes.group(0).flaw_of(1), "they do not begin as a frame does");
}

// -- who is missing ---------------------------------------------------------------------------------

TEST(a_rank_that_has_not_called_is_missing) {
    Meshes meshes(3);
    run_threads(2, [&](int rank) {
        CHECK_EQUAL(receive_piece(meshes.group(rank), 1, 1 - rank, soon).code, StatusCode::late);
        CHECK(meshes.group(rank).missing() == std::vector<int>{2});
    });
}

TEST(a_rank_that_is_in_the_call_and_waits_for_nobody_is_missing) {
    Meshes meshes(3);
    {
        const net::Lock guard = meshes.mesh(2).lock();
        meshes.group(2).enter(1, 4, 1);
    }
    run_threads(2, [&](int rank) {
        CHECK_EQUAL(receive_piece(meshes.group(rank), 1, 1 - rank, soon).code, StatusCode::late);
        CHECK(meshes.group(rank).missing() == std::vector<int>{2});
        CHECK(meshes.group(rank).last_call(2) == std::pair(std::uint64_t{1}, std::uint32_t{4}));
    });
}

TEST(a_rank_that_does_not_answer_is_missing) {
    Meshes meshes(2, {.asleep = {1}});
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, 1, soon).code, StatusCode::late);
    CHECK(meshes.group(0).missing() == std::vector<int>{1});
}

// -- leaving ----------------------------------------------------------------------------------------

TEST(a_rank_that_left_is_lost_to_later_calls_and_says_how_it_left) {
    Meshes meshes(3);
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 1).code, StatusCode::done); });
    CHECK(!meshes.group(0).leave_reason_of(2).has_value());
    meshes.group(2).leave("at line 12", 1);
    meshes.group(2).leave("twice", 9);
    CHECK(meshes.group(2).has_left());
    for (int rank = 0; rank < 2; ++rank) {
        const core::Status status = receive_piece(meshes.group(rank), 2, 1 - rank);  // of somebody else
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, 2);
        CHECK_EQUAL(meshes.group(rank).leave_reason_of(2).value_or("none"), "at line 12");
    }
}

TEST(a_rank_that_left_after_a_call_is_not_lost_to_it) {
    Meshes meshes(3);
    meshes.group(2).leave("done", 5);
    run_threads(2, [&](int rank) {
        Buffer out(10), in(10);
        CHECK_EQUAL(trade(meshes.group(rank), {5, 1 - rank, out, 1 - rank, in}).code, StatusCode::done);
        CHECK_EQUAL(receive_piece(meshes.group(rank), 5, 1 - rank, 200 * millisecond).code, StatusCode::late);
    });
}

TEST(what_a_process_waits_in_is_told_to_those_who_ask) {
    Meshes meshes(2);
    meshes.mesh(1).report("recv(src=0) at train.py:3");
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, 1, soon).code, StatusCode::late);
    meshes.group(0).missing();
    CHECK_EQUAL(meshes.mesh(0).report_of(1), "recv(src=0) at train.py:3");
}

}  // namespace ferrodist::tests
