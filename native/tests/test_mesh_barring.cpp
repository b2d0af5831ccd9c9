// SPDX-License-Identifier: MIT OR Apache-2.0
// The deadline of a call over TCP: a rank that has not entered is barred, by its own thread or by all others.
#include <atomic>
#include <vector>

#include "check.hpp"
#include "core/process.hpp"
#include "meshes.hpp"

namespace ferrodist::tests {
namespace {

using net::FrameKind;
using net::Group;
using core::StatusCode;

core::Status receive_piece(Group& group, int peer, std::int64_t timeout_ns) {
    Buffer here(10);
    return trade(group, {.sequence = 1, .from = peer, .in = here}, timeout_ns);
}

}  // namespace

TEST(over_tcp_a_call_is_done_on_all_ranks_or_on_none_at_its_deadline) {
    constexpr int world = 3;
    constexpr std::int64_t timeout = 10 * millisecond;
    for (std::size_t i = 0; i < times(100); ++i) {
        Meshes meshes(world);
        std::vector<StatusCode> codes(world);
        std::atomic<int> num_ready{0};
        meshes.run([&](Group& group) {
            ++num_ready;
            eventually([&] { return num_ready == world; });
            if (group.rank() == 2) {
                const std::int64_t end = core::now_ns() + timeout * static_cast<std::int64_t>(95 + i % 15) / 100;
                eventually([&] { return core::now_ns() >= end; });
            }
            codes[static_cast<std::size_t>(group.rank())] = go_round(group, 1, 100, timeout).code;
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
            CHECK(code == StatusCode::given_up || meshes.group(rank).missing() == barred);
        }
    }
}

TEST(who_has_entered_and_left_a_call_is_not_barred_from_it) {
    Meshes meshes(2);
    const Buffer piece(10);
    CHECK_EQUAL(trade(meshes.group(1), {.sequence = 1, .to = 0, .out = piece}).code, StatusCode::done);
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, soon).code, StatusCode::done);
    CHECK_EQUAL(receive_piece(meshes.group(0), 1, soon).code, StatusCode::late);  // there is no second one
    CHECK(!meshes.group(0).has_barred());
    CHECK(meshes.group(0).missing() == std::vector<int>{1});
    run_threads(2, [&](int rank) { CHECK_EQUAL(go_round(meshes.group(rank), 2).code, StatusCode::done); });
}

TEST(pieces_of_a_rank_that_does_not_answer_are_refused_by_all) {
    Meshes meshes(3, {.strangers = {2}});
    run_threads(2, [&](int rank) {
        CHECK_EQUAL(receive_piece(meshes.group(rank), 2, soon).code, StatusCode::late);
        CHECK(meshes.group(rank).missing() == std::vector<int>{2});
        CHECK(meshes.group(rank).has_barred());
    });
    for (int rank = 0; rank < 2; ++rank) {  // it comes after all
        meshes.stranger(2, rank).say({.kind = FrameKind::data, .sequence = 1, .fingerprint = 1}, Buffer(10));
        Buffer here(10);
        CHECK_EQUAL(trade_in_vain(meshes.group(rank), {.sequence = 1, .from = 2, .in = here}, 4).code,
                    StatusCode::interrupted);
    }
}

TEST(a_rank_of_which_a_piece_has_come_has_entered_though_it_does_not_answer) {
    Meshes meshes(3, {.strangers = {2}});
    meshes.stranger(2, 1).say({.kind = FrameKind::data, .sequence = 1, .fingerprint = 1}, Buffer(10));
    CHECK_EQUAL(receive_piece(meshes.group(1), 2, very_long).code, StatusCode::done);
    CHECK_EQUAL(receive_piece(meshes.group(0), 2, soon).code, StatusCode::late);
    CHECK(!meshes.group(0).has_barred());
    CHECK(meshes.group(0).missing() == std::vector<int>{2});
}

// -- the patience of a deadline that nobody chose ------------------------------------------------------------

namespace {

// Receives a piece with a deadline that is over soon, and that then is patient with who is not held for long.
core::Status receive_patiently(Group& group, int peer, core::ProgressHook& hook, std::int64_t longest_ns = very_long) {
    Buffer here(10);
    const core::WaitOptions options{&hook, core::now_ns() + millisecond, core::no_spins, 0, 0,
                                    {longest_ns, 100 * millisecond}};
    return net::exchange(group, 0, -1, {}, peer, here.data(), here.size(), {nullptr, nullptr, false, 1, 1}, options);
}

}  // namespace

TEST(over_tcp_a_rank_that_is_alive_is_waited_for_beyond_the_deadline) {
    Meshes meshes(3);
    std::atomic<int> num_polls{0};
    meshes.run([&](Group& group) {
        if (group.rank() == 2) {
            CHECK(eventually([&] { return num_polls > 10; }));
            for (int peer = 0; peer < 2; ++peer) {
                const Buffer piece(10);
                CHECK_EQUAL(trade(group, {.sequence = 1, .to = peer, .out = piece}).code, StatusCode::done);
            }
            return;
        }
        ActingHook hook([&] { return ++num_polls > 0; });
        CHECK_EQUAL(receive_patiently(group, 2, hook).code, StatusCode::done);
    });
}

TEST(over_tcp_a_rank_whose_heartbeat_says_that_it_is_held_is_not_waited_for) {
    Meshes meshes(2, {.strangers = {1}});
    meshes.stranger(1, 0).say({.kind = FrameKind::heartbeat, .sequence = 200 * millisecond});
    core::ProgressHook hook;
    CHECK_EQUAL(receive_patiently(meshes.group(0), 1, hook).code, StatusCode::late);
    CHECK(meshes.group(0).missing() == std::vector<int>{1});
}

TEST(over_tcp_patience_ends) {
    Meshes meshes(2);
    core::ProgressHook hook;
    const std::int64_t start = core::now_ns();
    CHECK_EQUAL(receive_patiently(meshes.group(0), 1, hook, 300 * millisecond).code, StatusCode::late);
    CHECK(core::now_ns() - start >= 300 * millisecond);
    CHECK(meshes.group(0).has_barred());
}

TEST(heartbeats_tell_how_long_a_thread_is_held) {
    Meshes meshes(2);
    const auto told = [&] {
        const net::Lock guard = meshes.mesh(0).lock();
        return meshes.mesh(0).held_ns(1);
    };
    {
        core::HeldThread held;
        held.note();
        CHECK(eventually([&] { return told() > 20 * millisecond; }));
    }
    CHECK(eventually([&] { return told() == 0; }));
}

}  // namespace ferrodist::tests
