// SPDX-License-Identifier: MIT OR Apache-2.0
// Receives from any rank and with any tag, probes, objects, shorter messages, and messages to oneself: the same in
// shared memory and over sockets.
#include <functional>
#include <memory>
#include <string>

#include "check.hpp"
#include "meshes.hpp"
#include "requests.hpp"
#include "shm/messages.hpp"

namespace ferrodist::tests {
namespace {

using core::Messages;
using core::Request;
using core::StatusCode;

constexpr std::size_t large = core::eager_limit + 1;
constexpr int any = -1;

// Some ranks and their messages, whatever connects them.
struct Team {
    virtual ~Team() = default;
    virtual Messages& of(int rank) = 0;
    virtual void kill(int rank) = 0;
    virtual void announce_closing(int rank) = 0;
    virtual void leave(int rank) = 0;
};

struct SharedTeam final : Team {
    explicit SharedTeam(int size) : host(size) {
        for (int rank = 0; rank < size; ++rank) {
            messages.push_back(std::make_unique<shm::Messages>(*host.group(rank)));
        }
    }
    Messages& of(int rank) override { return *messages[static_cast<std::size_t>(rank)]; }
    void kill(int rank) override { host.kill(rank); }
    void announce_closing(int rank) override { host.group(rank)->announce_closing(); }
    void leave(int rank) override { host.group(rank)->leave(""); }

    Host host;
    std::vector<std::unique_ptr<shm::Messages>> messages;
};

struct NetTeam final : Team {
    explicit NetTeam(int size) : meshes(size) {}
    Messages& of(int rank) override { return meshes.group(rank).messages(); }
    void kill(int rank) override { meshes.kill(rank); }
    void announce_closing(int rank) override { meshes.group(rank).announce_closing(); }
    void leave(int rank) override { meshes.group(rank).leave("", 0); }

    Meshes meshes;
};

void on_both(int size, const std::function<void(Team&)>& work) {
    SharedTeam shared(size);
    work(shared);
    NetTeam net(size);
    work(net);
}

// A receive, or a probe, that takes what it is told.
Posted post(Messages& messages, int source, int tag, Buffer* into, const std::function<void(Request&)>& change = {}) {
    Posted request(new Request, {&messages});
    request->peer = source;
    request->tag = static_cast<std::uint32_t>(tag);
    request->takes_any_source = source == any;
    request->takes_any_tag = tag == any;
    request->is_probe = into == nullptr;
    if (into != nullptr) {
        request->target = into->data();
        request->nbytes = into->size();
    }
    request->is_unattended = true;
    if (change) {
        change(*request);
    }
    messages.irecv(*request);
    return request;
}

// A send that goes on though nobody waits for it.
Posted start_send(Messages& messages, int peer, std::uint32_t tag, core::Bytes content, core::Bytes header = {}) {
    Posted send(new Request, {&messages});
    send->peer = peer;
    send->tag = tag;
    send->source = content.data();
    send->nbytes = content.size();
    send->is_unattended = true;
    messages.isend(*send, header);
    return send;
}

void deliver(Messages& messages, int peer, std::uint32_t tag, const Buffer& content, core::Bytes header = {}) {
    const auto send = start_send(messages, peer, tag, content, header);
    CHECK_EQUAL(wait_for(messages, *send).code, StatusCode::done);
}

// Of an array of bytes.
Buffer header_of(std::uint64_t rows, std::uint64_t columns) {
    Buffer header(19);
    header[0] = std::byte{5};
    header[1] = std::byte{2};
    std::memcpy(header.data() + 2, &rows, 8);
    std::memcpy(header.data() + 10, &columns, 8);
    return header;
}

Buffer object_header() {
    Buffer header = header_of(0, 0);
    header.back() = core::first_object_kind;
    return header;
}

void check_found(const Request& request, int source, std::uint32_t tag) {
    CHECK_EQUAL(request.found_source, source);
    CHECK_EQUAL(request.found_tag, tag);
}

}  // namespace

TEST(a_receive_from_any_rank_takes_small_and_large_messages) {
    on_both(3, [](Team& team) {
        for (const std::size_t size : {std::size_t{10}, large, std::size_t{0}, 5 * large}) {
            for (const int source : {2, 1}) {
                const Buffer content = random_bytes(size, static_cast<std::uint64_t>(source));
                Buffer here(size);
                const auto receive = post(team.of(0), any, any, &here);
                const auto send = start_send(team.of(source), 0, 7, content);
                CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
                CHECK_EQUAL(wait_for(team.of(source), *send).code, StatusCode::done);
                check_found(*receive, source, 7);
                CHECK(here == content);
            }
        }
    });
}

TEST(messages_of_one_rank_stay_in_order_however_they_are_received) {
    on_both(2, [](Team& team) {
        const std::size_t count = times(400);
        run_threads(2, [&](int rank) {
            for (std::uint64_t i = 0; i < count; ++i) {
                const std::size_t size = i % 11 == 10 ? large : 8 + i % 50;
                if (rank == 1) {
                    deliver(team.of(1), 0, 3, random_bytes(size, i));
                    continue;
                }
                Buffer here(size);
                const auto receive = post(team.of(0), i % 2 == 0 ? 1 : any, i % 3 == 0 ? 3 : any, &here);
                CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
                CHECK(here == random_bytes(size, i));
            }
        });
    });
}

TEST(no_rank_starves) {
    // Each sends again as soon as it was heard: the one looked at first must not always be the first.
    on_both(4, [](Team& team) {
        const std::size_t count = times(300);
        run_threads(4, [&](int rank) {
            Buffer word(8);
            if (rank > 0) {
                for (std::size_t i = 0; i < count; ++i) {
                    deliver(team.of(rank), 0, 1, word);
                    CHECK_EQUAL(receive(team.of(rank), 0, 2, word).code, StatusCode::done);
                }
                return;
            }
            std::size_t heard[4] = {};
            for (std::size_t i = 0; i < 3 * count; ++i) {
                const auto receive = post(team.of(0), any, 1, &word);
                CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
                ++heard[receive->found_source];
                deliver(team.of(0), receive->found_source, 2, word);
            }
            for (int source = 1; source < 4; ++source) {
                CHECK_EQUAL(heard[source], count);
            }
        });
    });
}

TEST(a_probe_tells_of_a_message_and_leaves_it) {
    on_both(2, [](Team& team) {
        const Buffer header = header_of(2, 5);
        const auto probe = post(team.of(0), any, any, nullptr), other = post(team.of(0), 1, 9, nullptr);
        Request peek;
        peek.takes_any_source = peek.takes_any_tag = true;
        CHECK(!team.of(0).peek(peek));
        deliver(team.of(1), 0, 4, Buffer(10), header);
        CHECK_EQUAL(wait_for(team.of(0), *probe).code, StatusCode::done);
        check_found(*probe, 1, 4);
        CHECK(probe->found == header);
        CHECK(!other->is_complete());
        CHECK(eventually([&] { return team.of(0).peek(peek); }));
        check_found(peek, 1, 4);
        Buffer here(10);
        CHECK_EQUAL(receive(team.of(0), 1, 4, here, header).code, StatusCode::done);
        CHECK(!team.of(0).peek(peek));
    });
}

TEST(a_receive_that_meets_an_object_fails_and_leaves_it) {
    on_both(2, [](Team& team) {
        for (const std::size_t size : {std::size_t{10}, large}) {
            const Buffer content = random_bytes(size, 1);
            Buffer here(size);
            const auto posted = post(team.of(0), any, 1, &here);
            const auto send = start_send(team.of(1), 0, 1, content, object_header());
            CHECK_EQUAL(wait_for(team.of(0), *posted).code, StatusCode::other_kind);
            CHECK_EQUAL(receive(team.of(0), 1, 1, here).code, StatusCode::other_kind);
            const auto right = post(team.of(0), 1, 1, &here, [](Request& one) { one.takes_object = true; });
            CHECK_EQUAL(wait_for(team.of(0), *right).code, StatusCode::done);
            CHECK_EQUAL(wait_for(team.of(1), *send).code, StatusCode::done);
            CHECK(here == content);
        }
    });
}

TEST(a_message_may_have_fewer_rows_than_there_is_room_for) {
    on_both(2, [](Team& team) {
        const auto takes_shorter = [](Request& one) {
            one.takes_shorter = one.keeps_header = true;
            one.header = header_of(4, 30'000);
            one.header.pop_back();
        };
        Buffer here(4 * 30'000);
        for (const std::uint64_t rows : {0u, 1u, 3u, 4u}) {
            const Buffer content = random_bytes(rows * 30'000, rows);
            const auto receive = post(team.of(0), 1, 1, &here, takes_shorter);
            const auto send = start_send(team.of(1), 0, 1, content, header_of(rows, 30'000));
            CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
            CHECK_EQUAL(wait_for(team.of(1), *send).code, StatusCode::done);
            CHECK_EQUAL(receive->nbytes, rows * 30'000);
            CHECK(std::equal(content.begin(), content.end(), here.begin()));
            CHECK(receive->found == header_of(rows, 30'000));
        }
        // Too many rows, rows of another length, a header that lies.
        for (const auto& [rows, columns, size] : {std::tuple{5u, 30'000u, 150'000u}, {4u, 10u, 40u}, {2u, 30'000u, 90u}}) {
            const Buffer content(size);
            const auto receive = post(team.of(0), 1, 1, &here, takes_shorter);
            const auto send = start_send(team.of(1), 0, 1, content, header_of(rows, columns));
            CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::unexpected);
            CHECK_EQUAL(wait_for(team.of(1), *send).code, StatusCode::done);
        }
    });
}

TEST(a_rank_sends_to_itself) {
    on_both(2, [](Team& team) {
        Messages& mine = team.of(1);
        for (const std::size_t size : {std::size_t{10}, large, std::size_t{0}}) {
            const Buffer content = random_bytes(size, size);
            Buffer before(size), after(size);
            const auto posted = post(mine, 1, 1, &before);
            const auto first = start_send(mine, 1, 1, content), second = start_send(mine, 1, 1, content);
            CHECK_EQUAL(wait_for(mine, *posted).code, StatusCode::done);
            CHECK_EQUAL(wait_for(mine, *first).code, StatusCode::done);
            CHECK_EQUAL(second->is_complete(), size < large);
            const auto late = post(mine, any, any, &after);
            CHECK_EQUAL(wait_for(mine, *late).code, StatusCode::done);
            CHECK_EQUAL(wait_for(mine, *second).code, StatusCode::done);
            check_found(*late, 1, 1);
            CHECK(before == content && after == content);
        }
        const Buffer content(large);
        start_send(mine, 1, 2, content);  // given up at once
        CHECK(mine.unexpected_tags(1).empty());
        const auto unwanted = start_send(mine, 1, 2, content);
        const auto nothing = post(mine, 1, 3, nullptr);
        team.announce_closing(1);
        CHECK_EQUAL(wait_for(mine, *unwanted).code, StatusCode::given_up);
        CHECK_EQUAL(wait_for(mine, *nothing).code, StatusCode::given_up);
    });
}

TEST(messages_to_itself_are_bounded) {
    on_both(1, [](Team& team) {
        team.of(0).set_unexpected_limit(3 * (100 + core::message_overhead));
        const Buffer content(100);
        Buffer here(100);
        for (int round = 0; round < 2; ++round) {
            std::vector<Posted> sends;
            for (int i = 0; i < 4; ++i) {
                sends.push_back(start_send(team.of(0), 0, 1, content));
                CHECK_EQUAL(sends.back()->is_complete(), i < 3);
            }
            for (int i = 0; i < 4; ++i) {
                CHECK_EQUAL(receive(team.of(0), 0, 1, here).code, StatusCode::done);
            }
            CHECK(sends.back()->is_complete());
        }
    });
}

TEST(a_receive_from_any_rank_fails_when_one_dies_after_what_is_there) {
    on_both(3, [](Team& team) {
        Buffer first(10), second(10);
        deliver(team.of(1), 0, 1, random_bytes(10, 1));
        team.kill(1);
        const auto there = post(team.of(0), any, any, &first);
        CHECK_EQUAL(wait_for(team.of(0), *there).code, StatusCode::done);
        CHECK(first == random_bytes(10, 1));
        const auto lost = post(team.of(0), any, any, &second);
        CHECK_EQUAL(wait_for(team.of(0), *lost).code, StatusCode::lost);
        CHECK_EQUAL(lost->status().failed_rank, 1);
        CHECK_EQUAL(wait_for(team.of(0), *post(team.of(0), any, 5, nullptr)).code, StatusCode::lost);
    });
}

TEST(a_receive_from_any_rank_goes_on_until_all_others_have_closed) {
    on_both(3, [](Team& team) {
        Buffer here(10);
        team.announce_closing(1);
        team.leave(1);
        const auto receive = post(team.of(0), any, any, &here);
        CHECK_EQUAL(wait_for(team.of(0), *receive, 30 * millisecond).code, StatusCode::late);
        deliver(team.of(2), 0, 1, random_bytes(10, 1));
        CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
        deliver(team.of(2), 0, 1, random_bytes(10, 2));
        team.announce_closing(2);
        CHECK_EQUAL(wait_for(team.of(0), *post(team.of(0), any, any, &here)).code, StatusCode::done);
        CHECK(here == random_bytes(10, 2));
        CHECK_EQUAL(wait_for(team.of(0), *post(team.of(0), any, any, &here)).code, StatusCode::lost);
    });
}

TEST(a_message_for_any_rank_that_is_withdrawn_makes_way_for_the_next) {
    on_both(3, [](Team& team) {
        Buffer here(large);
        const Buffer content = random_bytes(large, 2);
        for (int i = 0; i < 20; ++i) {
            auto withdrawn = start_send(team.of(1), 0, 1, content);
            const auto receive = post(team.of(0), any, 1, &here);
            withdrawn.reset();
            const auto send = start_send(team.of(2), 0, 1, content);
            CHECK_EQUAL(wait_for(team.of(0), *receive).code, StatusCode::done);
            if (receive->found_source == 1) {  // it was all there
                CHECK_EQUAL(tests::receive(team.of(0), 2, 1, here).code, StatusCode::done);
            }
            CHECK_EQUAL(wait_for(team.of(2), *send).code, StatusCode::done);
            CHECK(here == content);
        }
    });
}

TEST(a_receive_is_cancelled_as_long_as_nothing_has_matched_it) {
    on_both(2, [](Team& team) {
        Buffer here(10);
        const auto receive = post(team.of(0), any, 1, &here);
        CHECK(team.of(0).cancel(*receive, {StatusCode::cancelled}));
        CHECK(!team.of(0).cancel(*receive, {StatusCode::cancelled}));
        CHECK_EQUAL(receive->status().code, StatusCode::cancelled);
        deliver(team.of(1), 0, 1, random_bytes(10, 1));
        CHECK_EQUAL(tests::receive(team.of(0), 1, 1, here).code, StatusCode::done);
        CHECK(here == random_bytes(10, 1));
    });
}

}  // namespace ferrodist::tests
