// SPDX-License-Identifier: MIT OR Apache-2.0
// How far senders of pieces may run ahead of a rank that does not come to their call, and that the
// way is free again afterwards.
#include "check.hpp"
#include "meshes.hpp"

namespace ferrodist::tests {
namespace {

using net::Group;
using core::StatusCode;

// Sends pieces until one has to wait in vain, and counts their bytes.
std::uint64_t send_all_that_goes(Group& group, std::uint64_t sequence, const Buffer& piece) {
    std::uint64_t nbytes = 0;
    while (trade_in_vain(group, {.sequence = sequence, .to = 1, .out = piece}, 4).code == StatusCode::done) {
        nbytes += piece.size();
        CHECK(nbytes < 1 << 30);
    }
    return nbytes;
}

}  // namespace

TEST(a_rank_that_does_not_come_holds_no_more_than_the_window) {
    for (const std::size_t nbytes : {1u << 20, (1u << 20) - 1, 300'000u}) {
        Meshes meshes(2, {.piece_nbytes = 1 << 20});
        const std::uint64_t window = meshes.mesh(0).window_nbytes();
        const Buffer piece = random_bytes(nbytes, 1);
        const std::uint64_t sent = send_all_that_goes(meshes.group(0), 1, piece);
        CHECK(sent <= window);
        CHECK(sent + nbytes > window);
        CHECK(meshes.mesh(1).received_nbytes() < window + (1 << 20));
        Buffer here(nbytes);
        for (std::uint64_t taken = 0; taken < sent; taken += nbytes) {
            CHECK_EQUAL(trade(meshes.group(1), {.sequence = 1, .from = 0, .in = here}).code, StatusCode::done);
            CHECK(here == piece);
        }
        meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 2, 1 << 20).code, StatusCode::done); });
    }
}

TEST(a_window_is_one_groups_alone) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20});
    std::vector<std::shared_ptr<Group>> inner;
    for (int rank = 0; rank < 2; ++rank) {
        const net::Lock guard = meshes.mesh(rank).lock();
        inner.push_back(std::make_shared<Group>(meshes.shared_group(rank)->shared_mesh(), 9, std::vector<int>{0, 1},
                                                meshes.shared_group(rank)));
    }
    send_all_that_goes(meshes.group(0), 1, Buffer(1 << 20));
    run_threads(2, [&](int rank) {
        CHECK_EQUAL(go_round(*inner[static_cast<std::size_t>(rank)], 1, 1 << 20).code, StatusCode::done);
    });
}

TEST(what_was_dropped_with_its_call_opens_the_window_again) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20});
    for (std::uint64_t sequence = 1; sequence <= 5; ++sequence) {  // the other skips all of these
        const std::uint64_t sent = send_all_that_goes(meshes.group(0), 10 * sequence, Buffer(1 << 20));
        CHECK(sent >= meshes.mesh(0).window_nbytes() / 2);
        meshes.run([&](Group& group) { CHECK_EQUAL(go_round(group, 10 * sequence + 1).code, StatusCode::done); });
    }
}

// Pieces that were queued and never went out must not count for ever.
TEST(pieces_that_never_went_out_leave_the_window_open) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20, .asleep = {1}});
    shrink_buffers(meshes.mesh(0).link(1).socket());
    for (std::uint64_t sequence = 1; sequence <= 30; ++sequence) {
        CHECK_EQUAL(trade_in_vain(meshes.group(0), {.sequence = sequence, .to = 1, .out = Buffer(1 << 20)}).code,
                    StatusCode::interrupted);
    }
    CHECK(meshes.mesh(0).sent_nbytes() < 4 << 20);
    meshes.mesh(1).start();
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 100, 1 << 20).code, StatusCode::done); });
}

}  // namespace ferrodist::tests
