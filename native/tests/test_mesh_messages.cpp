// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages between two ranks: small ones that go at once, large ones that are announced, and what becomes
// of those that are not wanted, withdrawn, given up by their sender, or by their receiver.
#include <unistd.h>

#include <algorithm>
#include <string>

#include "check.hpp"
#include "meshes.hpp"
#include "requests.hpp"

namespace ferrodist::tests {
namespace {

using net::FrameKind;
using net::Group;
using core::StatusCode;

constexpr std::size_t large = core::eager_limit + 1;
constexpr std::string_view header = "float32 100";

Posted isend(Group& group, int peer, std::uint32_t tag, net::Bytes content, std::string_view its_header = header) {
    return tests::isend(group.messages(), peer, tag, content, bytes_of(its_header));
}

struct Received {
    core::Status status;
    Buffer content;
    std::string found;
};

Received receive(Group& group, int peer, std::uint32_t tag, std::size_t size, std::int64_t timeout_ns = very_long) {
    Buffer content(size), found;
    const core::Status status = tests::receive(group.messages(), peer, tag, content, bytes_of(header), timeout_ns, &found);
    return {status, content, text_of(found)};
}

core::Status wait_for(Group& group, core::Request& request, std::int64_t timeout_ns = very_long) {
    return tests::wait_for(group.messages(), request, timeout_ns);
}

// Sends a message and waits until its memory may change.
void deliver(Group& group, int peer, std::uint32_t tag, Buffer content) {
    const auto request = isend(group, peer, tag, content);
    CHECK(request->is_complete() || content.size() >= large);
    CHECK_EQUAL(wait_for(group, *request).code, StatusCode::done);
    std::fill(content.begin(), content.end(), std::byte{0xee});
}

}  // namespace

TEST(messages_of_all_sizes_arrive_in_order) {
    Meshes meshes(2);
    constexpr std::size_t sizes[] = {0, 1, 1000, large - 1, large, 300'000, 3 << 20, 5, large, 0};
    meshes.run([&](Group& group) {
        for (std::uint64_t i = 0; i < std::size(sizes); ++i) {
            if (group.rank() == 0) {
                deliver(group, 1, 3, random_bytes(sizes[i], i));
                continue;
            }
            const Received message = receive(group, 0, 3, sizes[i]);
            CHECK_EQUAL(message.status.code, StatusCode::done);
            CHECK(message.content == random_bytes(sizes[i], i));
        }
    });
}

TEST(messages_both_ways_at_once_arrive) {
    Meshes meshes(2);
    meshes.run([](Group& group) {
        const int peer = 1 - group.rank();
        for (std::uint64_t i = 0; i < times(50); ++i) {
            const Buffer content = random_bytes(large + i, i + static_cast<std::uint64_t>(group.rank()));
            const auto request = isend(group, peer, 1, content);
            const Received message = receive(group, peer, 1, large + i);
            CHECK(message.content == random_bytes(large + i, i + static_cast<std::uint64_t>(peer)));
            CHECK_EQUAL(wait_for(group, *request).code, StatusCode::done);
        }
    });
}

TEST(tags_keep_messages_apart) {
    Meshes meshes(2);
    Group &sender = meshes.group(0), &receiver = meshes.group(1);
    for (const std::uint32_t tag : {5u, 6u, 0xffffffffu}) {
        deliver(sender, 1, tag, random_bytes(100, tag));
    }
    CHECK_EQUAL(receive(receiver, 0, 7, 100, soon).status.code, StatusCode::late);
    CHECK(receiver.messages().unexpected_tags(0) == std::vector<std::uint32_t>({5, 6, 0xffffffff}));
    for (const std::uint32_t tag : {0xffffffffu, 6u, 5u}) {
        CHECK(receive(receiver, 0, tag, 100).content == random_bytes(100, tag));
    }
    CHECK(receiver.messages().unexpected_tags(0).empty());
}

TEST(a_message_of_another_size_or_header_is_told_and_dropped) {
    Meshes meshes(2);
    run_threads(2, [&](int rank) {
        Group& group = meshes.group(rank);
        if (rank == 0) {
            deliver(group, 1, 1, random_bytes(100, 1));
            deliver(group, 1, 1, random_bytes(large, 2));
            isend(group, 1, 1, random_bytes(100, 3), "int8 100");
            const Buffer content = random_bytes(large, 4);
            const auto request = isend(group, 1, 1, content, "int8 many");
            CHECK_EQUAL(wait_for(group, *request).code, StatusCode::done);
            deliver(group, 1, 1, random_bytes(50, 5));
            return;
        }
        for (const std::size_t size : {std::size_t{99}, large + 1}) {
            const Received message = receive(group, 0, 1, size);
            CHECK_EQUAL(message.status.code, StatusCode::unexpected);
            CHECK(message.found == header);
        }
        CHECK_EQUAL(receive(group, 0, 1, 100).found, "int8 100");
        CHECK_EQUAL(receive(group, 0, 1, large).found, "int8 many");
        CHECK(receive(group, 0, 1, 50).content == random_bytes(50, 5));
    });
}

TEST(a_large_message_may_be_taken_back_until_it_is_wanted) {
    Meshes meshes(2);
    const Buffer first = random_bytes(large, 1), second = random_bytes(large, 2);
    const auto request = isend(meshes.group(0), 1, 1, first);
    CHECK_EQUAL(wait_for(meshes.group(0), *request, soon).code, StatusCode::late);
    CHECK(meshes.group(0).messages().cancel(*request, {StatusCode::late}));
    CHECK(!meshes.group(0).messages().cancel(*request, {StatusCode::late}));
    CHECK_EQUAL(request->status().code, StatusCode::late);
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            deliver(meshes.group(0), 1, 1, second);
        } else {
            CHECK(receive(meshes.group(1), 0, 1, large).content == second);
        }
    });
    CHECK(meshes.group(1).messages().unexpected_tags(0).empty());
}

TEST(a_message_that_was_wanted_cannot_be_taken_back) {
    Meshes meshes(2, {.strangers = {1}});
    const Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0), 1, 1, content);
    const std::uint64_t number = meshes.stranger(1, 0).hear(FrameKind::rts).header.sequence;
    meshes.stranger(1, 0).say({.kind = FrameKind::cts, .sequence = number});
    CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::done);
    CHECK(!meshes.group(0).messages().cancel(*request, {StatusCode::late}));
    Buffer here;
    while (here.size() < large) {
        const Frame part = meshes.stranger(1, 0).hear(FrameKind::bulk);
        CHECK_EQUAL(part.header.sequence, number);
        here.insert(here.end(), part.payload.begin(), part.payload.end());
    }
    CHECK(here == content);
}

TEST(a_message_abandoned_in_the_middle_leaves_the_stream_in_step) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20, .strangers = {1}});
    Stranger& receiver = meshes.stranger(1, 0);
    shrink_buffers(meshes.mesh(0).link(1).socket());
    Buffer content = random_bytes(5 << 20, 1);
    const auto request = isend(meshes.group(0), 1, 1, content);
    const std::uint64_t number = receiver.hear(FrameKind::rts).header.sequence;
    receiver.say({.kind = FrameKind::cts, .sequence = number});
    CHECK_EQUAL(wait_for(meshes.group(0), *request, soon).code, StatusCode::late);  // nobody reads it
    CHECK(!meshes.group(0).messages().cancel(*request, {StatusCode::late}));
    meshes.group(0).messages().abandon(*request, {StatusCode::late});
    meshes.group(0).messages().abandon(*request, {StatusCode::late});
    content = Buffer();  // it is the caller's again
    isend(meshes.group(0), 1, 2, random_bytes(10, 2));
    CHECK_EQUAL(receiver.hear(FrameKind::abandoned).header.sequence, number);
    receiver.hear(FrameKind::eager);
    CHECK(receiver.link.is_up());
}

TEST(a_receiver_goes_on_to_the_next_message_when_one_is_abandoned) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& sender = meshes.stranger(0, 1);
    sender.say({.kind = FrameKind::rts, .tag = 1, .sequence = 7, .fingerprint = large}, buffer_of(header));
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            CHECK(receive(meshes.group(1), 0, 1, large).content == random_bytes(large, 2));
            return;
        }
        sender.hear(FrameKind::cts);
        sender.say({.kind = FrameKind::bulk, .sequence = 7}, random_bytes(1000, 1));
        sender.say({.kind = FrameKind::abandoned, .sequence = 7});
        sender.say({.kind = FrameKind::rts, .tag = 1, .sequence = 8, .fingerprint = large}, buffer_of(header));
        CHECK_EQUAL(sender.hear(FrameKind::cts).header.sequence, 8u);
        const Buffer content = random_bytes(large, 2);
        const auto middle = content.begin() + 40'000;
        sender.say({.kind = FrameKind::bulk, .sequence = 8}, Buffer(content.begin(), middle));
        sender.say({.kind = FrameKind::bulk, .sequence = 8}, Buffer(middle, content.end()));
    });
}

TEST(a_receiver_that_gives_up_in_the_middle_has_its_memory_back) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& sender = meshes.stranger(0, 1);
    sender.say({.kind = FrameKind::rts, .tag = 1, .sequence = 7, .fingerprint = large}, buffer_of(header));
    const net::FrameKey key(session_of(0, 1), 0);
    sender.say({.kind = FrameKind::bulk, .sequence = 7}, random_bytes(20, 1));  // too early: nobody's
    // The head of a frame and a part of what it carries, written past the link.
    Buffer bytes = frame_bytes({.kind = FrameKind::bulk, .sequence = 7, .number = 3}, random_bytes(30'000, 1), key);
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            CHECK_EQUAL(receive(meshes.group(1), 0, 1, large, 10 * soon).status.code, StatusCode::late);
            return;
        }
        sender.hear(FrameKind::cts);
        CHECK_EQUAL(::write(sender.link.socket(), bytes.data(), 10'000), 10'000);
    });
    CHECK_EQUAL(::write(sender.link.socket(), bytes.data() + 10'000, bytes.size() - 10'000),
                static_cast<ssize_t>(bytes.size() - 10'000));
    bytes = frame_bytes({.kind = FrameKind::eager, .tag = 1, .number = 4}, Buffer(2), key);
    CHECK_EQUAL(::write(sender.link.socket(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    CHECK_EQUAL(receive(meshes.group(1), 0, 1, 0).status.code, StatusCode::unexpected);  // it has no header
    CHECK_EQUAL(meshes.group(1).flaw_of(0), "");
}

TEST(a_message_to_a_rank_that_is_gone_is_lost) {
    Meshes meshes(2);
    const Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0), 1, 1, content);
    run_threads(2, [&](int rank) {
        if (rank == 1) {
            meshes.kill(1);
        } else {
            CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::lost);
        }
    });
    CHECK_EQUAL(receive(meshes.group(0), 1, 1, 10).status.code, StatusCode::lost);
}

TEST(a_message_to_a_rank_that_closes_and_receives_no_more_is_lost) {
    Meshes meshes(2);
    const Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0), 1, 1, content);
    Buffer here(10);
    auto receive_in_flight = irecv(meshes.group(1).messages(), 0, 2, here);
    meshes.group(1).announce_closing();  // one receive is still on its way
    CHECK_EQUAL(wait_for(meshes.group(0), *request, soon).code, StatusCode::late);
    receive_in_flight.reset();
    CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::lost);
    CHECK_EQUAL(receive(meshes.group(0), 1, 1, 10).status.code, StatusCode::lost);
}

TEST(ranks_that_send_in_a_cycle_find_it) {
    Meshes meshes(3);
    meshes.run([](Group& group) {
        const Buffer content = random_bytes(large, 1);
        const int right = (group.rank() + 1) % 3;
        const auto request = isend(group, right, 1, content);
        CHECK_EQUAL(wait_for(group, *request, 6 * soon).code, StatusCode::late);
        CHECK(group.find_send_cycle(right) == std::vector<int>({0, 1, 2}));
        CHECK(group.messages().cancel(*request, {StatusCode::late}));
    });
}

TEST(a_group_error_ends_the_waits_for_messages) {
    Meshes meshes(2);
    const Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0), 1, 1, content);
    meshes.group(1).set_error(0, "enough");
    CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::group_error);
    CHECK_EQUAL(receive(meshes.group(1), 0, 1, 10).status.code == StatusCode::done, false);
}

TEST(without_memory_for_a_message_both_sides_are_told_and_the_link_goes_on) {
    Meshes meshes(2);
    Group &sender = meshes.group(0), &receiver = meshes.group(1);
    const Buffer content = random_bytes(large, 7);
    {
        const NoMemory none;
        const auto send = isend(sender, 1, 3, content);
        CHECK_EQUAL(wait_for(sender, *send).code, StatusCode::no_memory);
        CHECK_EQUAL(receive(receiver, 0, 3, large).status.code, StatusCode::no_memory);
        deliver(sender, 1, 1, random_bytes(1000, 1));
        CHECK_EQUAL(receive(receiver, 0, 1, 1000).status.code, StatusCode::no_memory);
    }
    // The small one was done at once: the next send is told of it.
    CHECK(eventually([&] { return isend(sender, 1, 2, Buffer(10))->status().code == StatusCode::no_memory; }));
    meshes.run([&](Group& group) {
        if (group.rank() == 0) {
            deliver(group, 1, 1, random_bytes(1000, 2));
            deliver(group, 1, 3, content);
        } else {
            CHECK(receive(group, 0, 1, 1000).content == random_bytes(1000, 2));
            CHECK(receive(group, 0, 3, large).content == content);
        }
    });
}

}  // namespace ferrodist::tests
