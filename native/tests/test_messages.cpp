// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages in shared memory: requests in any number and order, and what becomes of them when a rank goes.
#include <algorithm>
#include <atomic>
#include <deque>

#include "check.hpp"
#include "core/process.hpp"
#include "requests.hpp"
#include "shm/messages.hpp"

namespace ferrodist::tests {
namespace {

using shm::Messages;
using core::StatusCode;

constexpr std::size_t large = core::eager_limit + 1;
constexpr std::int64_t soon = 50 * millisecond;

// Ranks of one host, with their messages.
class Mail {
public:
    explicit Mail(int size, std::size_t arena_nbytes = 64 << 20) : host(size, very_long, arena_nbytes) {
        for (int rank = 0; rank < size; ++rank) {
            messages_.push_back(std::make_unique<Messages>(*host.group(rank)));
        }
    }
    Messages& of(int rank) { return *messages_[static_cast<std::size_t>(rank)]; }
    void end(int rank) { messages_[static_cast<std::size_t>(rank)].reset(); }

    Host host;

private:
    std::vector<std::unique_ptr<Messages>> messages_;
};

void deliver(Messages& messages, int peer, std::uint32_t tag, Buffer content) {
    const auto send = isend(messages, peer, tag, content);
    CHECK(send->is_complete() || content.size() >= large);
    CHECK_EQUAL(wait_for(messages, *send).code, StatusCode::done);
    std::fill(content.begin(), content.end(), std::byte{0xee});
}

void check_next(Messages& messages, int peer, std::uint32_t tag, const Buffer& expected) {
    Buffer here(expected.size());
    CHECK_EQUAL(receive(messages, peer, tag, here).code, StatusCode::done);
    CHECK(here == expected);
}

}  // namespace

TEST(messages_of_all_sizes_arrive_in_order) {
    constexpr std::size_t sizes[] = {0, 1, 1000, 20'000, large - 1, large, 300'000, 3 << 20, 5, large, 0, 700'001};
    Mail mail(2);
    for (std::size_t round = 0; round < times(40); ++round) {
        run_threads(2, [&](int rank) {
            for (std::uint64_t i = 0; i < std::size(sizes); ++i) {
                if (rank == 0) {
                    deliver(mail.of(0), 1, 3, random_bytes(sizes[i], i));
                } else {
                    check_next(mail.of(1), 0, 3, random_bytes(sizes[i], i));
                }
            }
        });
    }
}

TEST(messages_go_both_ways_at_once) {
    Mail mail(3);
    run_threads(3, [&](int rank) {
        const int right = (rank + 1) % 3, left = (rank + 2) % 3;
        for (std::uint64_t i = 0; i < times(200); ++i) {
            const std::size_t size = i % 2 == 0 ? 10 : large + 1000 * i;
            const Buffer content = random_bytes(size, i + 100 * static_cast<std::uint64_t>(rank));
            Buffer here(size);
            const auto receive = irecv(mail.of(rank), left, 1, here);
            const auto send = isend(mail.of(rank), right, 1, content);
            CHECK_EQUAL(wait_for(mail.of(rank), *send).code, StatusCode::done);
            CHECK_EQUAL(wait_for(mail.of(rank), *receive).code, StatusCode::done);
            CHECK(here == random_bytes(size, i + 100 * static_cast<std::uint64_t>(left)));
        }
    });
}

TEST(thousands_of_requests_are_in_flight_and_nobody_waits_for_them) {
    Mail mail(2);
    const std::size_t count = times(10'000);
    std::vector<Buffer> here(count), there(count);
    std::deque<Posted> receives, sends;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t size = i % 100 == 99 ? large : i % 50;
        here[i].resize(size);
        there[i] = random_bytes(size, i);
        receives.push_back(irecv(mail.of(1), 0, static_cast<std::uint32_t>(i % 7), here[i]));
    }
    CHECK_EQUAL(mail.of(1).num_in_flight(), count);
    for (std::size_t i = 0; i < count; ++i) {
        Posted send(new core::Request, {&mail.of(0)});
        send->peer = 1;
        send->tag = static_cast<std::uint32_t>(i % 7);
        send->source = there[i].data();
        send->nbytes = there[i].size();
        send->is_unattended = true;
        mail.of(0).isend(*send, {});
        sends.push_back(std::move(send));
    }
    for (const auto* requests : {&sends, &receives}) {
        for (const Posted& one : *requests) {
            CHECK(eventually([&] { return one->is_complete(); }));
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        CHECK(here[i] == there[i]);
    }
}

TEST(beyond_the_limit_small_sends_wait_as_large_ones_do) {
    Mail mail(2);
    mail.of(0).set_unexpected_limit(100'000);
    std::deque<Buffer> contents;
    std::deque<Posted> sends;
    for (std::uint64_t i = 0; i < 30; ++i) {
        contents.push_back(random_bytes(i == 20 ? 0 : 10'000, i));
        sends.push_back(isend(mail.of(0), 1, 1, contents.back()));
    }
    CHECK_EQUAL(std::count_if(sends.begin(), sends.end(), [](const Posted& one) { return one->is_complete(); }),
                10);  // nine, and the one of no bytes
    run_threads(2, [&](int rank) {
        for (std::uint64_t i = 0; i < 30; ++i) {
            if (rank == 0) {
                CHECK_EQUAL(wait_for(mail.of(0), *sends[i]).code, StatusCode::done);
            } else {
                check_next(mail.of(1), 0, 1, contents[i]);
            }
        }
    });
    CHECK(isend(mail.of(0), 1, 1, contents[0])->is_complete());  // there is room again
}

TEST(a_receive_that_runs_out_of_time_is_withdrawn_and_its_message_stays) {
    Mail mail(2);
    Buffer here(10);
    const auto late = irecv(mail.of(1), 0, 1, here, {}, soon);
    CHECK(eventually([&] { return late->is_complete(); }));  // nobody waits for it
    CHECK_EQUAL(late->status().code, StatusCode::late);
    CHECK_EQUAL(receive(mail.of(1), 0, 1, here, {}, soon).code, StatusCode::late);
    deliver(mail.of(0), 1, 1, random_bytes(10, 1));
    CHECK(mail.of(1).unexpected_tags(0) == std::vector<std::uint32_t>({1}));
    check_next(mail.of(1), 0, 1, random_bytes(10, 1));
}

TEST(a_large_send_is_withdrawn_unless_it_was_matched) {
    Mail mail(2);
    const Buffer first = random_bytes(large, 1), second = random_bytes(large, 2);
    auto send = isend(mail.of(0), 1, 1, first);
    CHECK_EQUAL(wait_for(mail.of(0), *send, soon).code, StatusCode::late);
    CHECK(mail.of(1).unexpected_tags(0) == std::vector<std::uint32_t>({1}));
    CHECK(mail.of(0).cancel(*send, {StatusCode::late}));
    CHECK(mail.of(1).unexpected_tags(0).empty());
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            deliver(mail.of(0), 1, 1, second);
        } else {
            check_next(mail.of(1), 0, 1, second);
        }
    });
}

// The sender gives up at any moment: its message arrives whole or not at all, and the next one does.
TEST(a_send_that_is_abandoned_leaves_its_receive_to_the_next) {
    Mail mail(2);
    const Buffer next = random_bytes(3 << 20, 1'000'000);
    for (std::uint64_t i = 0; i < times(200); ++i) {
        run_threads(2, [&](int rank) {
            if (rank == 1) {
                Buffer here(next.size());
                CHECK_EQUAL(receive(mail.of(1), 0, 1, here).code, StatusCode::done);
                CHECK(here == next || here == random_bytes(next.size(), i));
                const bool is_next = here == next;
                deliver(mail.of(1), 0, 2, Buffer(is_next));
                return;
            }
            Buffer given_up = random_bytes(next.size(), i);
            auto send = isend(mail.of(0), 1, 1, given_up);
            wait_for(mail.of(0), *send, static_cast<std::int64_t>(i % 50) * 10'000);
            mail.of(0).abandon(*send, {StatusCode::late});
            const bool was_sent = !send->status().failed();
            std::fill(given_up.begin(), given_up.end(), std::byte{0xee});
            if (!was_sent) {
                deliver(mail.of(0), 1, 1, next);
            }
            check_next(mail.of(0), 1, 2, Buffer(!was_sent));
        });
    }
    CHECK(mail.of(1).unexpected_tags(0).empty());
}

TEST(a_receive_that_is_given_up_in_the_middle_lets_its_sender_go) {
    Mail mail(2);
    const Buffer content = random_bytes(20 << 20, 1);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(times(50)); ++i) {
        run_threads(2, [&](int rank) {
            if (rank == 0) {
                const auto send = isend(mail.of(0), 1, 1, content);
                CHECK_EQUAL(wait_for(mail.of(0), *send).code, StatusCode::done);
                return;
            }
            Buffer here(content.size());
            CHECK(eventually([&] { return !mail.of(1).unexpected_tags(0).empty(); }));
            const auto request = irecv(mail.of(1), 0, 1, here);
            wait_for(mail.of(1), *request, i * 100'000);
        });
    }
}

TEST(a_message_of_another_size_or_header_is_told_and_dropped) {
    Mail mail(2);
    run_threads(2, [&](int rank) {
        const Buffer header{std::byte{1}, std::byte{2}}, other{std::byte{1}, std::byte{3}};
        if (rank == 0) {
            const Buffer content = random_bytes(large, 2);
            isend(mail.of(0), 1, 1, Buffer(100), header);
            CHECK_EQUAL(wait_for(mail.of(0), *isend(mail.of(0), 1, 1, content, header)).code, StatusCode::done);
            deliver(mail.of(0), 1, 1, random_bytes(7, 3));
            return;
        }
        for (const std::size_t size : {std::size_t{99}, large}) {
            Buffer here(size), found;
            CHECK_EQUAL(receive(mail.of(1), 0, 1, here, other, very_long, &found).code, StatusCode::unexpected);
            CHECK(found == header);
        }
        check_next(mail.of(1), 0, 1, random_bytes(7, 3));
    });
}

namespace {

// Makes room when it is told the size; none for a header that begins with 0.
struct Room final : core::Place {
    std::byte* make(core::Bytes header, std::uint64_t nbytes) override {
        memory.assign(nbytes + 1, std::byte{0});
        return header.empty() || header[0] != std::byte{0} ? memory.data() : nullptr;
    }
    Buffer memory;
};

Posted irecv_any(Messages& messages, int peer, std::uint32_t tag, Room& room) {
    Posted receive(new core::Request, {&messages});
    receive->peer = peer;
    receive->tag = tag;
    receive->place = &room;
    messages.irecv(*receive);
    return receive;
}

void check_room(const Room& room, const Buffer& expected) {
    CHECK_EQUAL(room.memory.size(), expected.size() + 1);
    CHECK(std::equal(expected.begin(), expected.end(), room.memory.begin()));
}

}  // namespace

TEST(a_receive_of_unknown_size_makes_room_for_what_comes) {
    Mail mail(2);
    for (const std::size_t size : {std::size_t{0}, std::size_t{100}, std::size_t{40'000}, large, std::size_t{3} << 20}) {
        for (const bool is_posted_first : {true, false}) {
            const Buffer content = random_bytes(size, size);
            Room room;
            Posted receive(nullptr, {&mail.of(1)});
            if (is_posted_first) {
                receive = irecv_any(mail.of(1), 0, 1, room);
            }
            const auto send = isend(mail.of(0), 1, 1, content);
            if (!is_posted_first) {
                CHECK(eventually([&] { return !mail.of(1).unexpected_tags(0).empty(); }));
                receive = irecv_any(mail.of(1), 0, 1, room);
            }
            run_threads(2, [&](int rank) {
                CHECK_EQUAL(wait_for(mail.of(rank), rank == 0 ? *send : *receive).code, StatusCode::done);
            });
            CHECK_EQUAL(receive->nbytes, size);
            check_room(room, content);
        }
    }
}

TEST(a_receive_of_unknown_size_takes_the_next_message_when_one_is_withdrawn) {
    Mail mail(2);
    Room room;
    const Buffer first = random_bytes(large, 1), second = random_bytes(2 * large, 2);
    const auto receive = irecv_any(mail.of(1), 0, 1, room);
    auto send = isend(mail.of(0), 1, 1, first);
    CHECK(eventually([&] {
        mail.of(1).test(*receive);
        return receive->state() == core::Request::State::matched;
    }));
    send.reset();  // with its data on its way, or before
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            deliver(mail.of(0), 1, 1, second);
        } else {
            CHECK_EQUAL(wait_for(mail.of(1), *receive).code, StatusCode::done);
        }
    });
    check_room(room, second);
}

TEST(a_message_that_a_place_refuses_is_told_and_dropped) {
    Mail mail(2);
    run_threads(2, [&](int rank) {
        const Buffer header{std::byte{0}, std::byte{7}};
        if (rank == 0) {
            const Buffer content = random_bytes(large, 2);
            isend(mail.of(0), 1, 1, Buffer(100), header);
            CHECK_EQUAL(wait_for(mail.of(0), *isend(mail.of(0), 1, 1, content, header)).code, StatusCode::done);
            deliver(mail.of(0), 1, 1, random_bytes(7, 3));
            return;
        }
        for (int i = 0; i < 2; ++i) {
            Room room;
            const auto receive = irecv_any(mail.of(1), 0, 1, room);
            CHECK_EQUAL(wait_for(mail.of(1), *receive).code, StatusCode::unexpected);
            CHECK(receive->found == header);
        }
        check_next(mail.of(1), 0, 1, random_bytes(7, 3));
    });
}

TEST(a_rank_that_dies_ends_the_requests_that_need_it_and_no_others) {
    Mail mail(3);
    Buffer here(10), there(10);
    const Buffer content = random_bytes(large, 1);
    deliver(mail.of(1), 0, 1, random_bytes(10, 1));
    const auto send = isend(mail.of(0), 1, 5, content);
    const auto fine = irecv(mail.of(0), 1, 1, here), lost = irecv(mail.of(0), 1, 1, there);
    const auto other = irecv(mail.of(0), 2, 1, there);
    mail.host.kill(1);
    CHECK(eventually([&] { return lost->is_complete(); }));
    CHECK_EQUAL(lost->status().code, StatusCode::lost);
    CHECK_EQUAL(lost->status().failed_rank, 1);
    CHECK_EQUAL(fine->status().code, StatusCode::done);
    CHECK(here == random_bytes(10, 1));
    CHECK_EQUAL(wait_for(mail.of(0), *send).code, StatusCode::lost);
    CHECK(!other->is_complete());
    deliver(mail.of(2), 0, 1, random_bytes(10, 2));
    CHECK_EQUAL(wait_for(mail.of(0), *other).code, StatusCode::done);
}

TEST(a_rank_that_closes_takes_what_it_has_posted_receives_for) {
    Mail mail(2);
    const Buffer content = random_bytes(large, 1);
    Buffer here(large);
    const auto wanted = isend(mail.of(0), 1, 1, content), unwanted = isend(mail.of(0), 1, 2, content);
    const auto receive_in_flight = irecv(mail.of(1), 0, 1, here);
    Buffer nothing;
    const auto hopeless = irecv(mail.of(0), 1, 9, nothing);
    mail.host.group(1)->announce_closing();
    CHECK_EQUAL(wait_for(mail.of(0), *wanted).code, StatusCode::done);
    CHECK_EQUAL(wait_for(mail.of(1), *receive_in_flight).code, StatusCode::done);
    CHECK_EQUAL(wait_for(mail.of(0), *unwanted).code, StatusCode::lost);
    CHECK_EQUAL(wait_for(mail.of(0), *hopeless).code, StatusCode::lost);
}

TEST(an_error_of_the_group_ends_all_requests) {
    Mail mail(2);
    Buffer here(10);
    const Buffer content(large);
    const auto receive_in_flight = irecv(mail.of(0), 1, 1, here);
    const auto send = isend(mail.of(0), 1, 1, content);
    mail.host.group(1)->set_error(0, "enough");
    CHECK(eventually([&] { return receive_in_flight->is_complete(); }));
    CHECK_EQUAL(receive_in_flight->status().code, StatusCode::group_error);
    CHECK_EQUAL(wait_for(mail.of(0), *send).code, StatusCode::group_error);
}

TEST(who_wants_to_hear_of_a_request_does) {
    Mail mail(2);
    auto& completions = core::Completions::of_process();
    const std::uint64_t before = completions.begin_listening(), listener = completions.begin_listening();
    Buffer first(10), second(10), third(10);
    const auto heard = irecv(mail.of(1), 0, 1, first), unheard = irecv(mail.of(1), 0, 1, second);
    CHECK(mail.of(1).hear_of(*heard, 17));
    deliver(mail.of(0), 1, 1, Buffer(10));
    deliver(mail.of(0), 1, 1, Buffer(10));
    CHECK(completions.take(listener) == std::vector<std::uint64_t>({17}));
    CHECK(eventually([&] { return unheard->is_complete(); }));
    CHECK(!mail.of(1).hear_of(*unheard, 18));  // it is complete
    const auto failing = irecv(mail.of(1), 0, 1, third);
    failing->token = 19;  // of those nobody asks for only failures are told
    mail.of(1).cancel(*failing, {StatusCode::late});
    CHECK(completions.take(before).empty());  // another thread listens
    CHECK(completions.take(listener) == std::vector<std::uint64_t>({19}));
}

TEST(without_memory_for_a_message_both_sides_are_told_and_nothing_is_lost) {
    Mail mail(2);
    const Buffer content = random_bytes(large, 7);
    deliver(mail.of(0), 1, 1, random_bytes(100, 1));
    const auto behind = isend(mail.of(0), 1, 2, content);
    {
        const NoMemory none;
        Buffer here(10);
        CHECK_EQUAL(receive(mail.of(1), 0, 9, here).code, StatusCode::no_memory);
        CHECK_EQUAL(wait_for(mail.of(0), *behind).code, StatusCode::no_memory);
        check_next(mail.of(1), 0, 1, random_bytes(100, 1));  // which goes to its place
        deliver(mail.of(0), 1, 3, random_bytes(1000, 3));
    }
    check_next(mail.of(1), 0, 3, random_bytes(1000, 3));
    CHECK(mail.of(1).unexpected_tags(0).empty());
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            deliver(mail.of(0), 1, 2, content);
        } else {
            check_next(mail.of(1), 0, 2, content);
        }
    });
}

TEST(without_memory_to_note_a_large_message_its_send_fails_and_so_does_who_waits_for_another) {
    Mail mail(2);
    const Buffer content = random_bytes(large, 7);
    Buffer here(large);
    {
        const NoMemory none;
        const auto send = isend(mail.of(0), 1, 2, content);
        CHECK_EQUAL(receive(mail.of(1), 0, 9, here).code, StatusCode::no_memory);
        CHECK_EQUAL(wait_for(mail.of(0), *send).code, StatusCode::no_memory);
    }
    const auto again = irecv(mail.of(1), 0, 2, here);
    deliver(mail.of(0), 1, 2, content);
    CHECK_EQUAL(wait_for(mail.of(1), *again).code, StatusCode::done);
    CHECK(here == content);
}

TEST(several_threads_send_and_receive_on_one_group) {
    Mail mail(2);
    run_threads(8, [&](int number) {
        const int rank = number % 2;
        const auto tag = static_cast<std::uint32_t>(number / 2);
        for (std::uint64_t i = 0; i < times(300); ++i) {
            const std::size_t size = i % 10 == 9 ? large : 100 + i % 50;
            if (rank == 0) {
                deliver(mail.of(0), 1, tag, random_bytes(size, i + tag));
                check_next(mail.of(0), 1, tag, random_bytes(size, i));
            } else {
                check_next(mail.of(1), 0, tag, random_bytes(size, i + tag));
                deliver(mail.of(1), 0, tag, random_bytes(size, i));
            }
        }
    });
}

TEST(queues_and_rings_are_given_back) {
    Host host(2);
    const std::size_t before = host.arena(0).num_blocks();
    for (int i = 0; i < 3; ++i) {
        Messages sender(*host.group(0)), receiver(*host.group(1));
        CHECK(host.arena(0).num_blocks() >= before);
    }
    CHECK_EQUAL(host.arena(0).num_blocks(), before);
}

TEST(a_receive_in_flight_outlives_its_deadline_until_its_sender_is_held_elsewhere) {
    Mail mail(2);
    Buffer here(8);
    Posted receive(new core::Request, {&mail.of(1)});
    receive->peer = 0;
    receive->target = here.data();
    receive->nbytes = here.size();
    receive->is_unattended = true;
    receive->deadline_ns = core::now_ns() + millisecond;
    receive->last_deadline_ns = core::now_ns() + very_long;
    receive->stuck_ns = 100 * millisecond;
    mail.of(1).irecv(*receive);
    CHECK_EQUAL(wait_for(mail.of(1), *receive, 3 * soon).code, StatusCode::late);
    CHECK(!receive->is_complete());  // only the wait for it is over
    core::HeldThread elsewhere;
    elsewhere.note();
    CHECK_EQUAL(wait_for(mail.of(1), *receive).code, StatusCode::late);
    CHECK(receive->is_complete());
}

TEST(a_wait_for_a_message_is_patient_with_its_sender) {
    Mail mail(2);
    Buffer here(8);
    const auto receive = irecv(mail.of(1), 0, 1, here);
    std::atomic<int> num_polls{0};
    run_threads(2, [&](int rank) {
        if (rank == 0) {
            CHECK(eventually([&] { return num_polls > 5; }));
            deliver(mail.of(0), 1, 1, Buffer(8, std::byte{3}));
            return;
        }
        ActingHook hook([&] { return ++num_polls > 0; });
        const core::WaitOptions options{&hook, core::now_ns() + millisecond, core::no_spins, 0, 0,
                                        {very_long, 100 * millisecond}};
        CHECK_EQUAL(mail.of(1).wait(*receive, options, false).code, StatusCode::done);
    });
    CHECK(is_all(here.data(), here.size(), 3));
}

}  // namespace ferrodist::tests
