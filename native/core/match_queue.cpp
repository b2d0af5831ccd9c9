// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/match_queue.hpp"

namespace ferrodist::core {
namespace {

constexpr std::size_t num_kept_buckets = 64;  // empty ones: a conversation goes on with the same tags

bool is_wildcard(const Request& receive) { return receive.takes_any_source || receive.takes_any_tag; }

bool matches(const Request& receive, int source, std::uint32_t tag) {
    const bool is_tag = receive.takes_any_tag ? tag < first_internal_tag : receive.tag == tag;
    return is_tag && (receive.takes_any_source || receive.peer == source);
}

}  // namespace

MatchQueue::~MatchQueue() {
    while (!arrivals_.empty()) {
        take(*arrivals_.front());
    }
}

// -- posted receives -------------------------------------------------------------------------------

MatchQueue::Receives& MatchQueue::list_of(const Request& receive) {
    if (receive.is_probe) {
        return probes_;
    }
    return is_wildcard(receive) ? wildcards_ : buckets_[key(receive.peer, receive.tag)].posted;
}

void MatchQueue::post(Request& receive) {
    receive.order = ++last_order_;
    list_of(receive).push_back(receive);
}

void MatchQueue::post_again(Request& receive) {
    Receives& list = list_of(receive);
    Request* next = list.front();
    while (next != nullptr && next->order < receive.order) {
        next = Receives::after(*next);
    }
    list.insert_before(next, receive);
}

void MatchQueue::withdraw(Request& receive) {
    if (receive.is_probe || is_wildcard(receive)) {
        return list_of(receive).erase(receive);
    }
    const auto bucket = buckets_.find(key(receive.peer, receive.tag));
    bucket->second.posted.erase(receive);
    drop_if_empty(bucket);
}

Request* MatchQueue::take_posted(int source, std::uint32_t tag) {
    const auto bucket = buckets_.find(key(source, tag));
    Request* found = bucket == buckets_.end() ? nullptr : bucket->second.posted.front();
    for (Request* other = wildcards_.front(); other != nullptr; other = Receives::after(*other)) {
        if (found != nullptr && found->order < other->order) {
            break;
        }
        if (matches(*other, source, tag)) {
            found = other;
            break;
        }
    }
    if (found != nullptr) {
        withdraw(*found);
    }
    return found;
}

Request* MatchQueue::take_probe(int source, std::uint32_t tag) {
    for (Request* probe = probes_.front(); probe != nullptr; probe = Receives::after(*probe)) {
        if (matches(*probe, source, tag)) {
            probes_.erase(*probe);
            return probe;
        }
    }
    return nullptr;
}

// -- unexpected messages ---------------------------------------------------------------------------

const Unexpected& MatchQueue::keep(std::unique_ptr<Unexpected> message) {
    buckets_[key(message->source, message->tag)].unexpected.push_back(*message);
    arrivals_.push_back(*message);
    ++num_unexpected_;
    return *message.release();
}

Unexpected* MatchQueue::find(const Request& receive) const {
    if (num_unexpected_ == 0) {
        return nullptr;
    }
    if (!is_wildcard(receive)) {
        const auto bucket = buckets_.find(key(receive.peer, receive.tag));
        return bucket == buckets_.end() ? nullptr : bucket->second.unexpected.front();
    }
    Unexpected* message = arrivals_.front();
    while (message != nullptr && !matches(receive, message->source, message->tag)) {
        message = decltype(arrivals_)::after(*message);
    }
    return message;
}

std::unique_ptr<Unexpected> MatchQueue::take_rts(int source, std::uint64_t number) {
    for (Unexpected* one = arrivals_.front(); one != nullptr; one = decltype(arrivals_)::after(*one)) {
        if (one->is_rts && one->source == source && one->number == number) {
            return take(*one);
        }
    }
    return nullptr;
}

std::vector<std::uint32_t> MatchQueue::unexpected_tags(int source) const {
    std::vector<std::uint32_t> tags;
    for (const Unexpected* one = arrivals_.front(); one != nullptr; one = decltype(arrivals_)::after(*one)) {
        if (one->source == source) {
            tags.push_back(one->tag);
        }
    }
    return tags;
}

std::unique_ptr<Unexpected> MatchQueue::take(Unexpected& message) {
    const auto bucket = buckets_.find(key(message.source, message.tag));
    bucket->second.unexpected.erase(message);
    drop_if_empty(bucket);
    arrivals_.erase(message);
    --num_unexpected_;
    return std::unique_ptr<Unexpected>(&message);
}

void MatchQueue::drop_if_empty(Buckets::iterator bucket) {
    if (bucket->second.empty() && buckets_.size() > num_kept_buckets) {
        buckets_.erase(bucket);
    }
}

}  // namespace ferrodist::core
