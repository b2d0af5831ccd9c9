// SPDX-License-Identifier: MIT OR Apache-2.0
// One connection: frames cross it whole and in order whatever portions the kernel makes of them, and
// what is not right about it is found and told apart.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "check.hpp"
#include "ranks.hpp"
#include "wires.hpp"

namespace ferrodist::tests {
namespace {

using net::FrameKind;
using net::Header;
using net::Link;
using net::Ticket;

constexpr std::size_t sizes[] = {0,    1,     71,    72,     73,     1023,   1024, 1025, 4096,
                                 5000, 65463, 65464, 65465,  65535,  65536,  65537,
                                 0,    0,     3,     200000, 131072, 131000, Wire::piece};

std::vector<std::uint64_t> sequences_of(const Collector& heard) {
    std::vector<std::uint64_t> found;
    for (const Frame& frame : heard.frames) {
        found.push_back(frame.header.sequence);
    }
    return found;
}

bool holds(const Frame& frame, const Buffer& payload) { return frame.payload == payload; }

// Fills what the kernel holds, so that the last frame has begun and is not through.
void fill(Wire& wire, std::uint64_t sequence, const Buffer& payload) {
    send(wire.one, payload, sequence);
    wire.one.flush();
    CHECK(!wire.one.is_idle());
    CHECK(wire.one.sent_nbytes() > 0);
}

}  // namespace

TEST(frames_of_all_sizes_cross_both_ways_in_any_portions) {
    for (std::uint64_t seed = 1; seed <= times(20); ++seed) {
        Wire wire(seed);
        std::uint64_t sequence = 0;
        for (const std::size_t size : sizes) {
            send(wire.one, random_bytes(size, sequence), sequence);
            send(wire.two, random_bytes(size / 2, sequence + 100), sequence);
            ++sequence;
            wire.carry();
        }
        wire.carry_all();
        CHECK_EQUAL(wire.heard_by_two.frames.size(), std::size(sizes));
        CHECK_EQUAL(wire.heard_by_one.frames.size(), std::size(sizes));
        for (std::size_t i = 0; i < std::size(sizes); ++i) {
            CHECK_EQUAL(wire.heard_by_two.frames[i].header.sequence, i);
            CHECK(holds(wire.heard_by_two.frames[i], random_bytes(sizes[i], i)));
            CHECK(holds(wire.heard_by_one.frames[i], random_bytes(sizes[i] / 2, i + 100)));
        }
        CHECK_EQUAL(wire.one.state(), Link::State::up);
        CHECK_EQUAL(wire.one.num_sent(), std::size(sizes));
    }
}

TEST(a_frame_says_on_which_cpu_its_sender_ran) {
    Wire wire;
    CHECK_EQUAL(wire.two.peer_cpu(), 0u);
    const std::vector<int> cpus = allowed_cpus();
    for (const int cpu : cpus) {
        stay_on({cpu});
        send(wire.two, random_bytes(10, 1), 1);  // after own data, too
        send(wire.one, random_bytes(10, 2), 2);
        wire.carry_all();
        CHECK_EQUAL(wire.two.peer_cpu(), static_cast<std::uint32_t>(cpu) + 1);
    }
    stay_on(cpus);
}

TEST(payloads_go_to_their_places_and_come_from_the_memory_of_their_senders) {
    Wire wire;
    const Buffer sent = random_bytes(5 * Wire::piece, 3);
    Buffer here(sent.size());
    Ticket ticket;
    for (std::uint64_t i = 0; i < 5; ++i) {
        wire.one.send_in_place({.kind = FrameKind::data, .sequence = i},
                               net::Bytes(sent).subspan(i * Wire::piece, Wire::piece), ticket);
    }
    CHECK_EQUAL(ticket.pending, 5u);
    wire.heard_by_two.place = [&](const Header& header) { return here.data() + header.sequence * Wire::piece; };
    wire.carry_all();
    CHECK_EQUAL(ticket.pending, 0u);
    CHECK(here == sent);
    CHECK(std::all_of(wire.heard_by_two.frames.begin(), wire.heard_by_two.frames.end(),
                      [](const Frame& frame) { return frame.was_placed; }));
}

TEST(a_pause_leaves_what_is_behind_a_frame_for_the_next_time) {
    struct Pausing : Collector {
        explicit Pausing(Link& link) : from(link) {}
        void on_frame(int peer, const Header& header, net::Payload payload, bool is_void) override {
            Collector::on_frame(peer, header, std::move(payload), is_void);
            from.pause();
        }
        Link& from;
    };
    for (const std::size_t size : {std::size_t{0}, std::size_t{100}, net::large_payload}) {
        const Ends ends = connect_ends();
        Link sender(ends.left, session_of(0, 1), 0, 1, Wire::piece), receiver(ends.right, session_of(0, 1), 1, 0, Wire::piece);
        Pausing heard(receiver);
        for (std::uint64_t i = 0; i < 4; ++i) {
            send(sender, random_bytes(size, i), i);
        }
        sender.flush();
        CHECK(sender.is_idle());
        for (std::size_t i = 0; i < 4; ++i) {
            const bool is_all = receiver.pump(heard);
            CHECK_EQUAL(heard.frames.size(), i + 1);
            CHECK(holds(heard.frames[i], random_bytes(size, i)));
            CHECK_EQUAL(heard.asked.size(), size == 0 ? 0 : i + 1);  // nor has the next one a place yet
            CHECK(i == 3 || !is_all);
        }
        CHECK(receiver.pump(heard));
        CHECK_EQUAL(heard.frames.size(), 4u);
    }
}

TEST(what_is_urgent_overtakes_all_that_has_not_begun) {
    Wire wire;
    fill(wire, 1, random_bytes(Wire::piece, 1));
    send(wire.one, random_bytes(1000, 2), 2);
    send(wire.one, {}, 3);
    send(wire.one, {}, 101, true, FrameKind::poll);
    send(wire.one, random_bytes(50, 4), 102, true, FrameKind::group_error);
    wire.carry_all();
    CHECK(sequences_of(wire.heard_by_two) == std::vector<std::uint64_t>({1, 101, 102, 2, 3}));
    CHECK(holds(wire.heard_by_two.frames[2], random_bytes(50, 4)));
    CHECK_EQUAL(wire.two.state(), Link::State::up);
}

TEST(urgent_frames_at_any_moment_keep_the_stream_in_step) {
    for (std::uint64_t seed = 1; seed <= times(20); ++seed) {
        Wire wire(seed);
        std::mt19937_64 random(seed);
        std::uint64_t num_plain = 0, num_urgent = 0;
        for (int i = 0; i < 300; ++i) {
            if (random() % 3 == 0) {
                send(wire.one, random_bytes(random() % 100, num_urgent), num_urgent, true, FrameKind::group_error);
                ++num_urgent;
            } else {
                send(wire.one, random_bytes(random() % 20'000, num_plain), num_plain);
                ++num_plain;
            }
            if (random() % 3 == 0) {
                wire.carry(20'000);
            }
        }
        wire.carry_all();
        CHECK_EQUAL(wire.two.state(), Link::State::up);
        std::uint64_t plain = 0, urgent = 0;
        for (const Frame& frame : wire.heard_by_two.frames) {  // each kind in its own order
            const bool is_urgent = frame.header.kind == FrameKind::group_error;
            CHECK_EQUAL(frame.header.sequence, is_urgent ? urgent++ : plain++);
            CHECK(holds(frame, random_bytes(frame.payload.size(), frame.header.sequence)));
        }
        CHECK_EQUAL(plain, num_plain);
        CHECK_EQUAL(urgent, num_urgent);
    }
}

TEST(a_ticket_detached_in_mid_frame_keeps_the_stream_in_step) {
    for (std::uint64_t seed = 1; seed <= times(20); ++seed) {
        Wire wire(seed);
        const Buffer sent = random_bytes(4 * Wire::piece, seed);
        Buffer memory = sent;
        Ticket ticket, other;
        send(wire.one, random_bytes(10, 1), 50);
        for (std::uint64_t i = 0; i < 4; ++i) {
            wire.one.send_in_place({.kind = FrameKind::data, .sequence = i},
                                   net::Bytes(memory).subspan(i * Wire::piece, Wire::piece), ticket);
        }
        const Buffer kept = random_bytes(500, 9);
        wire.one.send_in_place({.kind = FrameKind::data, .sequence = 60}, kept, other);
        for (std::uint64_t i = 0; i < seed; ++i) {
            wire.carry(30'000);
        }
        wire.one.detach(ticket);
        CHECK_EQUAL(ticket.pending, 0u);
        std::fill(memory.begin(), memory.end(), std::byte{0xee});  // it is the caller's again
        memory.clear();
        memory.shrink_to_fit();
        send(wire.one, random_bytes(700, 2), 70);
        wire.carry_all();
        CHECK_EQUAL(wire.two.state(), Link::State::up);
        CHECK_EQUAL(other.pending, 0u);
        const std::vector<std::uint64_t> found = sequences_of(wire.heard_by_two);
        CHECK_EQUAL(found.front(), 50u);
        CHECK(found.size() >= 3 && found[found.size() - 2] == 60 && found.back() == 70);
        for (std::size_t i = 1; i + 2 < found.size(); ++i) {
            CHECK_EQUAL(found[i], i - 1);
            const auto begin = sent.begin() + static_cast<std::ptrdiff_t>((i - 1) * Wire::piece);
            CHECK(holds(wire.heard_by_two.frames[i], Buffer(begin, begin + Wire::piece)));
        }
    }
}

TEST(a_place_that_is_given_up_in_mid_frame_is_left_alone) {
    Wire wire;
    Buffer place(Wire::piece);
    wire.heard_by_two.place = [&](const Header& header) { return header.sequence == 1 ? place.data() : nullptr; };
    send(wire.one, random_bytes(Wire::piece, 1), 1);
    send(wire.one, random_bytes(1000, 2), 2);
    while (place[0] == std::byte{0} || wire.two.received_nbytes() < Wire::piece / 4) {
        wire.carry(10'000);
    }
    CHECK(wire.heard_by_two.frames.empty());
    wire.two.give_up_place(place.data() + 1, place.size());  // somebody else's
    wire.two.give_up_place(place.data(), place.size());
    place.assign(place.size(), std::byte{0xee});
    wire.carry_all();
    CHECK(std::all_of(place.begin(), place.end(), [](std::byte one) { return one == std::byte{0xee}; }));
    CHECK_EQUAL(wire.heard_by_two.frames.size(), 2u);
    CHECK(wire.heard_by_two.frames[0].is_void);
    CHECK(!wire.heard_by_two.frames[1].is_void);
    CHECK(holds(wire.heard_by_two.frames[1], random_bytes(1000, 2)));
    CHECK_EQUAL(wire.two.state(), Link::State::up);
}

TEST(a_connection_that_ends_behind_a_whole_frame_has_ended) {
    Wire wire;
    send(wire.one, random_bytes(1000, 1), 1);
    wire.carry_all();
    wire.hang_up_one();
    wire.two.pump(wire.heard_by_two);
    CHECK_EQUAL(wire.two.state(), Link::State::ended);
    CHECK_EQUAL(wire.two.flaw(), "its connection ended");
    CHECK_EQUAL(wire.heard_by_two.frames.size(), 1u);
}

TEST(a_connection_that_ends_in_mid_frame_is_broken) {
    for (const std::size_t cut : {1u, 71u, 72u, 73u, 500u, 1071u}) {  // in the header, and behind it
        const Ends ends = connect_ends();
        Link link(ends.left, session_of(0, 1), 1, 0, Wire::piece);
        const net::FrameKey key(session_of(0, 1), 0);
        const Buffer bytes = frame_bytes({.kind = FrameKind::data, .number = 1}, random_bytes(1000, 1), key);
        CHECK_EQUAL(::send(ends.right, bytes.data(), cut, 0), static_cast<ssize_t>(cut));
        ::close(ends.right);
        Collector heard;
        for (int i = 0; i < 3; ++i) {
            link.pump(heard);
        }
        CHECK_EQUAL(link.state(), Link::State::broken);
        CHECK(heard.frames.empty());
    }
}

TEST(a_connection_that_is_broken_lets_go_of_what_was_to_go_out) {
    const Ends ends = connect_ends();
    Link link(ends.left, session_of(0, 1), 0, 1, Wire::piece);
    const Buffer memory = random_bytes(Wire::piece, 1);
    Ticket ticket;
    ::close(ends.right);
    link.send_in_place({.kind = FrameKind::data}, memory, ticket);
    link.flush();
    CHECK_EQUAL(ticket.pending, 0u);
    Collector heard;
    link.pump(heard);
    CHECK_EQUAL(link.state(), Link::State::broken);
    link.send_in_place({.kind = FrameKind::data}, memory, ticket);
    CHECK_EQUAL(ticket.pending, 0u);
    CHECK(link.is_idle() && link.is_delivered());
}

TEST(what_has_come_is_heard_though_nothing_goes_out_any_more) {
    const Ends ends = connect_ends();
    Link link(ends.left, session_of(0, 1), 1, 0, Wire::piece);
    {
        Link other(ends.right, session_of(0, 1), 0, 1, Wire::piece);
        for (std::uint64_t i = 0; i < 5; ++i) {
            send(other, random_bytes(10'000, i), i);
        }
        other.flush();
    }
    send(link, random_bytes(10, 1));  // to one who is gone
    link.flush();
    Collector heard;
    while (link.is_up()) {
        link.pump(heard);
    }
    CHECK_EQUAL(heard.frames.size(), 5u);
    CHECK(!link.flaw().empty());
}

TEST(a_flipped_bit_anywhere_is_found) {
    for (std::size_t bit = 0; bit < 8 * (net::header_nbytes + 60); bit += 1 + bit % 7) {
        Wire wire(bit);
        std::size_t seen = 0;
        wire.harm = [&](Buffer& portion) {
            if (bit / 8 >= seen && bit / 8 < seen + portion.size()) {
                portion[bit / 8 - seen] ^= std::byte(1 << bit % 8);
            }
            seen += portion.size();
        };
        send(wire.one, random_bytes(60, 1), 1);
        send(wire.one, random_bytes(60, 2), 2);
        wire.carry_all();
        CHECK_EQUAL(wire.two.state(), Link::State::corrupt);
        CHECK_EQUAL(wire.two.flaw(), bit < 32                       ? "they do not begin as a frame does"
                                     : bit < 8 * net::header_nbytes ? "the seal does not fit the header"
                                                                    : "the digest does not fit the payload");
        CHECK(wire.heard_by_two.frames.empty());
    }
}

TEST(a_frame_that_is_left_out_repeated_or_moved_is_found) {
    const net::FrameKey key(session_of(0, 1), 0);
    const auto frame = [&](std::uint64_t number) {
        return frame_bytes({.kind = FrameKind::data, .number = number}, random_bytes(10, number), key);
    };
    for (const std::vector<std::uint64_t>& numbers : {std::vector<std::uint64_t>{1, 3}, {1, 1}, {2, 1}, {0}}) {
        const Ends ends = connect_ends();
        Link link(ends.left, session_of(0, 1), 1, 0, Wire::piece);
        Collector heard;
        for (const std::uint64_t number : numbers) {
            const Buffer bytes = frame(number);
            CHECK_EQUAL(::send(ends.right, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
        }
        link.pump(heard);
        CHECK_EQUAL(link.state(), Link::State::corrupt);
        CHECK_EQUAL(link.flaw(), "the header does not fit the link");
        CHECK_EQUAL(heard.frames.size(), numbers.size() == 2 && numbers[0] == 1 ? 1u : 0u);
        ::close(ends.right);
    }
}

TEST(a_frame_sent_back_to_its_sender_is_found) {
    const Ends ends = connect_ends();
    Link link(ends.left, session_of(0, 1), 0, 1, Wire::piece);
    send(link, random_bytes(100, 1));
    link.flush();
    Buffer bytes(net::header_nbytes + 100);
    CHECK_EQUAL(::recv(ends.right, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    CHECK_EQUAL(::send(ends.right, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    Collector heard;
    link.pump(heard);
    CHECK_EQUAL(link.state(), Link::State::corrupt);
    CHECK_EQUAL(link.flaw(), "the seal does not fit the header");
    ::close(ends.right);
}

TEST(a_length_beyond_its_bound_is_refused_before_there_is_a_place_for_it) {
    const net::FrameKey key(session_of(0, 1), 0);
    for (const std::uint64_t length : {Wire::piece + 1, std::uint64_t{1} << 40, UINT64_MAX}) {
        const Ends ends = connect_ends();
        Link link(ends.left, session_of(0, 1), 1, 0, Wire::piece);
        const net::HeaderBytes bytes = net::encode({.kind = FrameKind::data, .number = 1, .length = length}, key);
        CHECK_EQUAL(::send(ends.right, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
        Collector heard;
        link.pump(heard);
        CHECK_EQUAL(link.state(), Link::State::corrupt);
        CHECK(heard.asked.empty());
        ::close(ends.right);
    }
}

TEST(a_link_that_hears_what_cannot_be_right_still_sends) {
    const Ends ends = connect_ends();
    Link link(ends.left, session_of(0, 1), 1, 0, Wire::piece);
    const Buffer noise = random_bytes(200, 5);
    CHECK_EQUAL(::send(ends.right, noise.data(), noise.size(), 0), static_cast<ssize_t>(noise.size()));
    Collector heard;
    link.pump(heard);
    CHECK_EQUAL(link.state(), Link::State::corrupt);
    send(link, random_bytes(10, 6), 1, true, FrameKind::group_error);
    link.flush();
    Link other(ends.right, session_of(0, 1), 0, 1, Wire::piece);
    other.pump(heard);
    CHECK_EQUAL(heard.frames.size(), 1u);
    CHECK(holds(heard.frames.at(0), random_bytes(10, 6)));
}

TEST(a_finished_link_delivers_what_was_sent_and_then_ends) {
    Wire wire;
    send(wire.one, random_bytes(10'000, 1), 1);
    while (!wire.one.is_idle()) {
        wire.carry();
    }
    wire.one.finish();
    send(wire.one, random_bytes(10, 2), 2);
    CHECK(wire.one.is_idle());
    send(wire.two, random_bytes(10'000, 3), 3);  // this way it is still open
    wire.carry_all();
    CHECK_EQUAL(wire.heard_by_two.frames.size(), 1u);
    CHECK_EQUAL(wire.heard_by_one.frames.size(), 1u);
    CHECK(eventually([&] {
        wire.carry();
        return !wire.two.is_up();
    }));
    CHECK_EQUAL(wire.two.state(), Link::State::ended);
}

}  // namespace ferrodist::tests
