// SPDX-License-Identifier: MIT OR Apache-2.0
// Ranks that know the key and say what no rank of ours would: nobody crashes, no memory is touched that
// is somebody else's, and those who are well go on.
#include <unistd.h>

#include <limits>
#include <string>

#include "check.hpp"
#include "meshes.hpp"
#include "requests.hpp"
#include "net/split.hpp"

namespace ferrodist::tests {
namespace {

using net::FrameKind;
using net::Group;
using net::Split;
using core::StatusCode;

constexpr std::size_t large = core::eager_limit + 1;
constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

core::Status receive(Group& group, int peer, std::uint32_t tag, Buffer& into, std::int64_t timeout_ns = very_long) {
    return tests::receive(group.messages(), peer, tag, into, {}, timeout_ns);
}

core::Status wait_for(Group& group, core::Request& request, std::int64_t timeout_ns = very_long) {
    return tests::wait_for(group.messages(), request, timeout_ns);
}

Buffer list_of(const std::vector<int>& members) {
    const net::Bytes bytes = std::as_bytes(std::span(members));
    return {bytes.begin(), bytes.end()};
}

// Whether a frame of this kind means something, whatever it says.
bool makes_sense(FrameKind kind) {
    return kind == FrameKind::propose || kind == FrameKind::group_error || kind == FrameKind::left ||
           kind == FrameKind::closing || kind == FrameKind::bar;
}

// A small message is the last thing a stranger says: when it is here, all before it was handled.
void check_is_heard(Group& group, Stranger& stranger, int rank) {
    stranger.say({.kind = FrameKind::eager, .tag = 99}, Buffer(2));
    Buffer nothing;
    CHECK_EQUAL(receive(group, rank, 99, nothing).code, StatusCode::done);
    CHECK_EQUAL(group.flaw_of(rank), "");
}

}  // namespace

// -- messages ---------------------------------------------------------------------------------------

TEST(nobody_but_its_receiver_can_have_a_message) {
    Meshes meshes(3, {.strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0).messages(), 2, 1, content);
    for (std::uint64_t number = 0; number < 10; ++number) {
        stranger.say({.kind = FrameKind::cts, .sequence = number});
        stranger.say({.kind = FrameKind::taken, .sequence = number});
    }
    for (std::uint64_t number = 0; number < 10; ++number) {
        CHECK_EQUAL(stranger.hear(FrameKind::abandoned).header.sequence, number);
    }
    CHECK_EQUAL(wait_for(meshes.group(0), *request, soon).code, StatusCode::late);
    run_threads(2, [&](int number) {
        if (number == 0) {
            CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::done);
            return;
        }
        Buffer here(large);
        CHECK_EQUAL(receive(meshes.group(2), 0, 1, here).code, StatusCode::done);
        CHECK(here == content);
    });
}

TEST(a_message_that_is_accepted_twice_is_sent_once) {
    Meshes meshes(2, {.strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    const Buffer content = random_bytes(large, 1);
    const auto request = isend(meshes.group(0).messages(), 1, 1, content);
    const std::uint64_t number = stranger.hear(FrameKind::rts).header.sequence;
    for (int i = 0; i < 5; ++i) {
        stranger.say({.kind = FrameKind::cts, .sequence = number});
    }
    CHECK_EQUAL(wait_for(meshes.group(0), *request).code, StatusCode::done);
    check_is_heard(meshes.group(0), stranger, 1);
    isend(meshes.group(0).messages(), 1, 2, Buffer(3));
    std::size_t nbytes = stranger.hear(FrameKind::bulk).payload.size();
    nbytes += stranger.hear(FrameKind::bulk).payload.size();
    CHECK_EQUAL(nbytes, large);
    stranger.hear(FrameKind::eager);  // and no content before it
    CHECK_EQUAL(stranger.num_heard(FrameKind::bulk), 0u);
}

TEST(a_message_that_is_accepted_and_refused_keeps_its_memory_until_it_is_through) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20, .strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    shrink_buffers(meshes.mesh(0).link(1).socket());
    Buffer content = random_bytes(4 << 20, 1);
    const auto request = isend(meshes.group(0).messages(), 1, 1, content);
    const std::uint64_t number = stranger.hear(FrameKind::rts).header.sequence;
    stranger.say({.kind = FrameKind::cts, .sequence = number});
    stranger.say({.kind = FrameKind::taken, .sequence = number});
    CHECK_EQUAL(wait_for(meshes.group(0), *request, 4 * soon).code, StatusCode::late);
    meshes.group(0).messages().abandon(*request, {StatusCode::late});
    content = Buffer();
    isend(meshes.group(0).messages(), 1, 2, Buffer(3));
    stranger.hear(FrameKind::eager);
    CHECK(stranger.link.is_up());
}

TEST(content_behind_the_end_of_a_message_goes_nowhere) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& stranger = meshes.stranger(0, 1);
    stranger.say({.kind = FrameKind::rts, .tag = 1, .sequence = 7, .fingerprint = large});
    const net::FrameKey key(session_of(0, 1), 0);
    Buffer bytes = frame_bytes({.kind = FrameKind::abandoned, .sequence = 7, .number = 2}, {}, key);
    const Buffer content = frame_bytes({.kind = FrameKind::bulk, .sequence = 7, .number = 3}, Buffer(50'000), key);
    bytes.insert(bytes.end(), content.begin(), content.begin() + 1000);
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            stranger.hear(FrameKind::cts);
            CHECK_EQUAL(::write(stranger.link.socket(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
            return;
        }
        Buffer here(large);
        CHECK_EQUAL(receive(meshes.group(1), 0, 1, here, 6 * soon).code, StatusCode::late);
    });
    const auto rest = static_cast<ssize_t>(content.size() - 1000);
    CHECK_EQUAL(::write(stranger.link.socket(), content.data() + 1000, content.size() - 1000), rest);
    CHECK(eventually([&] { return meshes.mesh(1).received_nbytes() >= 50'000 + 3 * net::header_nbytes; }));
    CHECK_EQUAL(meshes.group(1).flaw_of(0), "");
}

TEST(content_that_is_too_long_or_nobodys_goes_nowhere) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& stranger = meshes.stranger(0, 1);
    stranger.say({.kind = FrameKind::bulk, .sequence = 7}, Buffer(100));
    stranger.say({.kind = FrameKind::rts, .tag = 1, .sequence = 7, .fingerprint = 100});
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            stranger.hear(FrameKind::cts);
            stranger.say({.kind = FrameKind::bulk, .sequence = 7}, random_bytes(60, 1));
            stranger.say({.kind = FrameKind::bulk, .sequence = 7}, random_bytes(41, 2));
            stranger.say({.kind = FrameKind::bulk, .sequence = 7}, {});
            stranger.say({.kind = FrameKind::bulk, .sequence = 8}, random_bytes(40, 3));
            stranger.say({.kind = FrameKind::bulk, .sequence = 7}, random_bytes(40, 4));
            return;
        }
        Buffer here(100), expected = random_bytes(60, 1), rest = random_bytes(40, 4);
        expected.insert(expected.end(), rest.begin(), rest.end());
        CHECK_EQUAL(receive(meshes.group(1), 0, 1, here).code, StatusCode::done);
        CHECK(here == expected);
    });
}

TEST(two_messages_under_one_number_do_not_meet) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& stranger = meshes.stranger(0, 1);
    for (const std::uint32_t tag : {1u, 2u}) {
        stranger.say({.kind = FrameKind::rts, .tag = tag, .sequence = 7, .fingerprint = large});
    }
    run_threads(3, [&](int number) {
        if (number == 0) {
            stranger.hear(FrameKind::cts);
            return;
        }
        Buffer here(large);
        const auto tag = static_cast<std::uint32_t>(number);
        CHECK(receive(meshes.group(1), 0, tag, here, (number + 1) * soon).failed());
    });
    stranger.say({.kind = FrameKind::bulk, .sequence = 7}, Buffer(1000));
    check_is_heard(meshes.group(1), stranger, 0);
}

TEST(messages_that_are_none_are_dropped) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& stranger = meshes.stranger(0, 1);
    for (const Buffer& payload : {Buffer{}, Buffer(1), Buffer{std::byte{1}, std::byte{0}},
                                  Buffer(100, std::byte{0xff}), Buffer{std::byte{0xff}, std::byte{0xff}}}) {
        stranger.say({.kind = FrameKind::eager, .tag = 5}, payload);
    }
    check_is_heard(meshes.group(1), stranger, 0);
    CHECK(meshes.group(1).messages().unexpected_tags(0).empty());
}

TEST(an_offer_of_any_size_takes_no_memory) {
    Meshes meshes(2, {.strangers = {0}});
    Stranger& stranger = meshes.stranger(0, 1);
    for (const std::uint64_t size : {most, std::uint64_t{1} << 60, std::uint64_t{0}}) {
        stranger.say({.kind = FrameKind::rts, .tag = 5, .sequence = 1, .fingerprint = size});
        Buffer here(10);
        CHECK_EQUAL(receive(meshes.group(1), 0, 5, here).code, StatusCode::unexpected);
        CHECK_EQUAL(stranger.hear(FrameKind::taken).header.sequence, 1u);
    }
}

// -- splits -----------------------------------------------------------------------------------------

TEST(a_list_of_members_that_others_do_not_have_does_not_count) {
    Meshes meshes(3, {.strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    for (const std::vector<int>& list : {std::vector<int>{1}, {1, 0}, {0, 1}, {1, 0, 2, 1}}) {
        stranger.say({.kind = FrameKind::join, .group = 5}, list_of(list));
        check_is_heard(meshes.group(0), stranger, 1);
        const Wait wait(soon);
        Split split(meshes.shared_group(0), {2, 0, 1}, 5);
        CHECK_EQUAL(split.wait(wait.options).code, StatusCode::late);
        CHECK(split.absent() == std::vector<int>({2, 1}));
        stranger.say({.kind = FrameKind::join, .group = 5}, list_of({1, 2, 0}));  // another order
        check_is_heard(meshes.group(0), stranger, 1);
        CHECK(split.absent() == std::vector<int>({2, 1}));
        stranger.say({.kind = FrameKind::join, .group = 5}, list_of({2, 0, 1}));
        check_is_heard(meshes.group(0), stranger, 1);
        CHECK(split.absent() == std::vector<int>{2});
        stranger.say({.kind = FrameKind::unjoin, .group = 5});
        check_is_heard(meshes.group(0), stranger, 1);
        CHECK(split.absent() == std::vector<int>({2, 1}));
    }
}

TEST(lists_of_members_that_cannot_be_are_dropped) {
    Meshes meshes(3, {.strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    constexpr int lowest = std::numeric_limits<int>::min(), highest = std::numeric_limits<int>::max();
    for (const std::vector<int>& list : {std::vector<int>{}, {-1, 1}, {1, 3}, {lowest, 1}, {1, highest}, {0, 2},
                                         {1, 1, 0}, std::vector<int>(65536, 1)}) {
        stranger.say({.kind = FrameKind::join, .group = 5}, list_of(list));
    }
    stranger.say({.kind = FrameKind::join, .group = 5}, Buffer(3));
    stranger.say({.kind = FrameKind::unjoin, .group = 6});
    check_is_heard(meshes.group(0), stranger, 1);
    for (int peer = 0; peer < 3; ++peer) {
        CHECK(meshes.mesh(0).invitations_of(peer).empty());
    }
}

// -- the rest ---------------------------------------------------------------------------------------

TEST(frames_that_make_no_sense_are_dropped) {
    Meshes meshes(3, {.strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    constexpr int num_kinds = static_cast<int>(FrameKind::last) + 1;
    for (int i = 0; i < 2 * num_kinds; ++i) {  // each of them before and behind each other
        const int kind = i % num_kinds;
        if (makes_sense(static_cast<FrameKind>(kind))) {
            continue;
        }
        for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}, most}) {
            for (const std::uint64_t group : {std::uint64_t{0}, most}) {
                const net::Header header{.kind = static_cast<FrameKind>(kind), .tag = 0xffffffff, .group = group,
                                         .sequence = number, .fingerprint = most};
                for (const std::uint64_t size : {0, 1, 3, 4, 40, 100}) {
                    if (size <= net::longest_payload(header.kind, 1 << 16)) {
                        stranger.say(header, Buffer(size, std::byte{0xff}));
                    }
                }
            }
        }
    }
    check_is_heard(meshes.group(0), stranger, 1);
    const std::vector<int> missing = meshes.group(0).missing();
    for (const int rank : missing) {
        CHECK(rank >= 0 && rank < 3);
    }
    for (const int rank : meshes.group(0).find_send_cycle(1)) {
        CHECK(rank >= 0 && rank < 3);
    }
}

TEST(a_credit_that_claims_too_much_does_not_shut_the_window) {
    Meshes meshes(2, {.piece_nbytes = 1 << 20, .strangers = {1}});
    Stranger& stranger = meshes.stranger(1, 0);
    shrink_buffers(meshes.mesh(0).link(1).socket());
    run_threads(2, [&](int rank) {  // a piece that is queued, credited, and never goes out
        if (rank == 0) {
            const Buffer piece(1 << 20);
            for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
                const Trade what{.sequence = sequence, .to = 1, .out = piece};
                CHECK_EQUAL(trade(meshes.group(0), what, 2 * soon).code, StatusCode::late);
            }
            return;
        }
        stranger.say({.kind = FrameKind::credit, .sequence = most});
        CHECK(eventually([&] { return meshes.group(0).last_call(0).first == 3; }));
        stranger.say({.kind = FrameKind::credit, .sequence = most});
    });
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            CHECK_EQUAL(trade(meshes.group(0), {.sequence = 4, .to = 1, .out = Buffer(10)}).code, StatusCode::done);
            return;
        }
        CHECK(eventually([&] { return stranger.hear(FrameKind::data).header.sequence == 4; }));
    });
}

TEST(pieces_of_calls_that_never_come_do_not_stop_those_that_do) {
    Meshes meshes(3, {.strangers = {1}});
    meshes.stranger(1, 0).say({.kind = FrameKind::data, .sequence = most, .fingerprint = 1}, Buffer(100));
    meshes.stranger(1, 0).say({.kind = FrameKind::data, .sequence = 0, .fingerprint = 1}, Buffer(100));
    check_is_heard(meshes.group(0), meshes.stranger(1, 0), 1);
    run_threads(2, [&](int number) {
        const int rank = 2 * number, peer = 2 - rank;
        Buffer out(10), in(10);
        CHECK_EQUAL(trade(meshes.group(rank), {1, peer, out, peer, in}).code, StatusCode::done);
    });
    Buffer here(100);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 2, .from = 1, .in = here}, soon).code, StatusCode::late);
}

// -- differences ------------------------------------------------------------------------------------

TEST(a_late_piece_of_a_call_does_not_hide_that_ranks_differ_in_the_next_one) {
    Meshes meshes(2, {.strangers = {1}});
    Group& group = meshes.group(0);
    Stranger& stranger = meshes.stranger(1, 0);
    const auto enter = [&](std::uint64_t sequence) {
        const net::Lock guard = group.mesh().lock();
        return group.enter(sequence, 0, 7).code;
    };
    CHECK_EQUAL(enter(1), StatusCode::done);
    stranger.say({.kind = FrameKind::ask, .sequence = 2});
    stranger.say({.kind = FrameKind::data, .sequence = 1, .fingerprint = 8}, Buffer(1));
    check_is_heard(group, stranger, 1);
    CHECK_EQUAL(enter(2), StatusCode::mismatch);
}

}  // namespace ferrodist::tests
