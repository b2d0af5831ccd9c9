// SPDX-License-Identifier: MIT OR Apache-2.0
// Meshes that are well: pieces cross them, whichever thread reads, and what was sent arrives though its sender
// is gone.
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "check.hpp"
#include "meshes.hpp"
#include "requests.hpp"

namespace ferrodist::tests {
namespace {

using net::Group;
using core::StatusCode;

void send(Group& group, int peer, std::uint32_t tag, net::Bytes content) {
    CHECK(isend(group.messages(), peer, tag, content)->is_complete());
}

core::Status receive(Group& group, int peer, std::uint32_t tag, Buffer& into) {
    return tests::receive(group.messages(), peer, tag, into);
}

bool is_idle(net::Mesh& mesh, int peer) {
    const net::Lock guard = mesh.lock();
    return mesh.link(peer).is_idle();
}

}  // namespace

TEST(pieces_of_all_sizes_go_round) {
    for (const int size : {2, 3, 5}) {
        Meshes meshes(size);
        meshes.run([](Group& group) {
            std::uint64_t sequence = 0;
            for (const std::size_t nbytes : {0u, 1u, 100u, 4096u, 65535u, 65536u}) {
                CHECK_EQUAL(go_round(group, ++sequence, nbytes).code, StatusCode::done);
            }
            for (std::size_t i = 0; i < times(200); ++i) {
                CHECK_EQUAL(go_round(group, ++sequence, 64).code, StatusCode::done);
            }
        });
    }
}

TEST(pieces_go_round_though_the_kernel_holds_little) {
    const MeshSetup setup{.piece_nbytes = 1 << 20};
    Meshes meshes(3, setup);
    for (int rank = 0; rank < 3; ++rank) {
        for (int peer = 0; peer < 3; ++peer) {
            if (peer != rank) {
                shrink_buffers(meshes.mesh(rank).link(peer).socket());
            }
        }
    }
    meshes.run([](Group& group) {
        for (std::uint64_t sequence = 1; sequence <= times(20); ++sequence) {
            CHECK_EQUAL(go_round(group, sequence, 1 << 20).code, StatusCode::done);
        }
    });
}

TEST(a_rank_may_only_send_or_only_receive) {
    Meshes meshes(2);
    const Buffer sent = random_bytes(5000, 1);
    Buffer here(sent.size());
    meshes.run([&](Group& group) {
        for (std::uint64_t sequence = 1; sequence <= 10; ++sequence) {
            const Trade what = group.rank() == 0 ? Trade{.sequence = sequence, .to = 1, .out = sent}
                                                 : Trade{.sequence = sequence, .from = 0, .in = here};
            CHECK_EQUAL(trade(group, what).code, StatusCode::done);
        }
    });
    CHECK(here == sent);
}

TEST(pieces_that_come_before_anybody_waits_for_them_are_kept) {
    Meshes meshes(2);
    for (std::uint64_t i = 0; i < 20; ++i) {  // of call 1, then of call 2
        CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1 + i / 10, .to = 1, .out = random_bytes(i, i)}).code,
                    StatusCode::done);
    }
    for (std::uint64_t i = 0; i < 20; ++i) {
        Buffer here(i);
        CHECK_EQUAL(trade(meshes.group(1), {.sequence = 1 + i / 10, .from = 0, .in = here}).code, StatusCode::done);
        CHECK(here == random_bytes(i, i));
    }
}

TEST(what_is_left_of_a_call_is_dropped_in_the_next) {
    Meshes meshes(2);
    const Buffer old = random_bytes(300, 1), fresh = random_bytes(300, 2);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1, .to = 1, .out = old}).code, StatusCode::done);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 2, .to = 1, .out = fresh}).code, StatusCode::done);
    Buffer here(300);
    CHECK_EQUAL(trade(meshes.group(1), {.sequence = 2, .from = 0, .in = here}).code, StatusCode::done);
    CHECK(here == fresh);
}

TEST(several_threads_of_a_rank_wait_at_once) {
    Meshes meshes(2);
    constexpr std::uint32_t num_threads = 4;
    run_threads(2 * num_threads + 2, [&](int number) {
        Group& group = meshes.group(number % 2);
        const int peer = 1 - number % 2;
        const auto tag = static_cast<std::uint32_t>(number / 2);
        if (tag == num_threads) {
            for (std::uint64_t sequence = 1; sequence <= times(100); ++sequence) {
                CHECK_EQUAL(go_round(group, sequence).code, StatusCode::done);
            }
            return;
        }
        for (std::uint64_t i = 0; i < times(100); ++i) {
            const std::size_t size = 1 + 997 * i % 5000;
            send(group, peer, tag, random_bytes(size, 100 * i + tag));
            Buffer here(size);
            CHECK_EQUAL(receive(group, peer, tag, here).code, StatusCode::done);
            CHECK(here == random_bytes(size, 100 * i + tag));
        }
    });
}

TEST(bytes_sent_and_received_are_counted) {
    Meshes meshes(2);
    meshes.run([](Group& group) { CHECK_EQUAL(go_round(group, 1, 10'000).code, StatusCode::done); });
    CHECK(eventually([&] { return meshes.mesh(1).received_nbytes() >= 2 * 10'000; }));
    CHECK(meshes.mesh(0).sent_nbytes() >= 2 * 10'000);
    CHECK(meshes.mesh(0).sent_nbytes() < 3 * 10'000);
}

TEST(a_rank_that_finishes_has_delivered_everything) {
    Meshes meshes(3, {.asleep = {1}});
    shrink_buffers(meshes.mesh(0).link(1).socket());
    constexpr std::uint64_t count = 100;
    for (std::uint64_t i = 0; i < count; ++i) {  // nobody reads: the kernel does not take all of it
        for (const int peer : {1, 2}) {
            send(meshes.group(0), peer, 7, random_bytes(60'000, i));
        }
    }
    CHECK(!is_idle(meshes.mesh(0), 1));
    run_threads(2, [&](int number) {
        if (number == 0) {
            meshes.mesh(0).finish();
            meshes.kill(0);
            return;
        }
        Buffer here(60'000);
        for (std::uint64_t i = 0; i < count; ++i) {
            CHECK_EQUAL(receive(meshes.group(1), 0, 7, here).code, StatusCode::done);
            CHECK(here == random_bytes(here.size(), i));
        }
        CHECK_EQUAL(receive(meshes.group(1), 0, 7, here).code, StatusCode::lost);
    });
    Buffer here(60'000);
    for (std::uint64_t i = 0; i < count; ++i) {
        CHECK_EQUAL(receive(meshes.group(2), 0, 7, here).code, StatusCode::done);
        CHECK(here == random_bytes(here.size(), i));
    }
}

TEST(finishing_gives_up_on_a_rank_that_does_not_read) {
    Meshes meshes(2, {.asleep = {1}});
    shrink_buffers(meshes.mesh(0).link(1).socket());
    for (std::uint64_t i = 0; i < 10; ++i) {
        send(meshes.group(0), 1, 7, random_bytes(60'000, i));
    }
    meshes.mesh(0).finish();  // and returns
    CHECK(!is_idle(meshes.mesh(0), 1));
}

// The bytes and the end of a connection may be there together: one event tells of both.
TEST(the_end_of_a_connection_is_heard_though_it_comes_with_the_last_bytes) {
    Meshes meshes(2, {.asleep = {0}, .strangers = {1}});
    const Buffer sent = random_bytes(100, 1);
    meshes.stranger(1, 0).say({.kind = net::FrameKind::data, .sequence = 1, .fingerprint = 1}, sent);
    ::shutdown(meshes.stranger(1, 0).link.socket(), SHUT_WR);
    Buffer here(100);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1, .from = 1, .in = here}).code, StatusCode::done);
    CHECK(here == sent);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 2, .from = 1, .in = here}, 2 * second).code, StatusCode::lost);
}

}  // namespace ferrodist::tests
