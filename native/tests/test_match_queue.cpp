// SPDX-License-Identifier: MIT OR Apache-2.0
// Which receive gets which message.
#include "check.hpp"
#include "core/match_queue.hpp"

namespace ferrodist::tests {
namespace {

using core::MatchQueue;
using core::Request;
using core::Unexpected;

std::unique_ptr<Unexpected> message(int source, std::uint32_t tag, std::uint64_t number) {
    return std::unique_ptr<Unexpected>(
        new Unexpected{source, tag, true, number, 0, core::OwnBytes(nullptr, nullptr), {}, {}});
}

// A receive; -1 takes any source, or any tag.
struct Receive : Request {
    Receive(int source, int with_tag) {
        peer = source;
        tag = static_cast<std::uint32_t>(with_tag);
        takes_any_source = source < 0;
        takes_any_tag = with_tag < 0;
    }
};

std::unique_ptr<Unexpected> take(MatchQueue& queue, const Request& receive) {
    Unexpected* const found = queue.find(receive);
    return found == nullptr ? nullptr : queue.take(*found);
}

std::uint64_t number_of(const std::unique_ptr<Unexpected>& message) { return message == nullptr ? 0 : message->number; }

}  // namespace

TEST(a_message_goes_to_the_oldest_receive_that_takes_it) {
    MatchQueue queue;
    Receive other(1, 6), first(1, 5), any_tag(1, -1), second(1, 5), any_source(-1, 6), any(-1, -1);
    for (Request* receive : {static_cast<Request*>(&other), static_cast<Request*>(&first),
                             static_cast<Request*>(&any_tag), static_cast<Request*>(&second),
                             static_cast<Request*>(&any_source), static_cast<Request*>(&any)}) {
        queue.post(*receive);
    }
    CHECK(queue.take_posted(1, 5) == &first);
    CHECK(queue.take_posted(1, 5) == &any_tag);
    CHECK(queue.take_posted(1, 5) == &second);
    CHECK(queue.take_posted(2, 6) == &any_source);
    CHECK(queue.take_posted(1, core::first_internal_tag) == nullptr);  // any tag is any of the users'
    CHECK(queue.take_posted(1, 6) == &other);
    CHECK(queue.take_posted(3, 9) == &any);
    CHECK(queue.take_posted(3, 9) == nullptr);
}

TEST(a_receive_takes_the_oldest_message_it_matches) {
    MatchQueue queue;
    queue.keep(message(1, core::first_internal_tag, 1));
    queue.keep(message(1, 5, 2));
    queue.keep(message(2, 5, 3));
    queue.keep(message(1, 6, 4));
    queue.keep(message(1, 5, 5));
    CHECK(queue.unexpected_tags(1) == std::vector<std::uint32_t>({core::first_internal_tag, 5, 6, 5}));
    CHECK_EQUAL(number_of(take(queue, Receive(1, 6))), 4u);
    CHECK_EQUAL(number_of(take(queue, Receive(-1, -1))), 2u);
    CHECK_EQUAL(number_of(take(queue, Receive(-1, 5))), 3u);
    CHECK_EQUAL(number_of(take(queue, Receive(1, -1))), 5u);
    CHECK(take(queue, Receive(1, -1)) == nullptr);
    CHECK(queue.take_rts(2, 1) == nullptr);
    CHECK_EQUAL(number_of(queue.take_rts(1, 1)), 1u);
    CHECK_EQUAL(queue.num_unexpected(), 0u);
}

TEST(a_receive_goes_back_to_its_place) {
    MatchQueue queue;
    Receive first(1, 5), second(1, 5), third(1, 5);
    queue.post(first);
    queue.post(second);
    queue.post(third);
    CHECK(queue.take_posted(1, 5) == &first);
    CHECK(queue.take_posted(1, 5) == &second);
    queue.post_again(second);
    queue.post_again(first);
    queue.withdraw(second);
    CHECK(queue.take_posted(1, 5) == &first);
    CHECK(queue.take_posted(1, 5) == &third);
    for (int tag = 0; tag < 1000; ++tag) {  // keys come and go
        Receive one(2, tag);
        queue.post(one);
        CHECK(queue.take_posted(2, static_cast<std::uint32_t>(tag)) == &one);
    }
}

}  // namespace ferrodist::tests
