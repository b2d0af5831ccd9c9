// SPDX-License-Identifier: MIT OR Apache-2.0
// MatchQueue: the posted receives and the unexpected messages of one group, whatever brings messages.
//
// A message goes to the oldest posted receive that takes it, a receive takes the oldest message it
// matches. Both are kept by (source, tag), where almost all are found; receives from any source or with
// any tag stand in a list of their own, and every message also in a list in the order of arrival. Numbers
// in the order of posting tell which of two receives is older. Probes wait apart: they take nothing. Not
// safe for several threads: the owner holds its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/request.hpp"

namespace ferrodist::core {

// From here on tags are not users': such messages are part of a call of the whole group.
constexpr std::uint32_t first_internal_tag = std::uint32_t{1} << 31;

using Bytes = std::span<const std::byte>;
using OwnBytes = std::unique_ptr<std::byte[], void (*)(std::byte*)>;

// The last byte of a header says what was sent; from here on it is the bytes of an object.
constexpr std::byte first_object_kind{0xfe};
inline bool is_object(Bytes header) { return !header.empty() && header.back() >= first_object_kind; }

// A message that came before anybody wanted it: all of it, or the announcement of a large one (RTS).
struct Unexpected {
    int source;
    std::uint32_t tag;
    bool is_rts;
    std::uint64_t number;  // of a large one
    std::uint64_t nbytes;
    OwnBytes memory;
    Bytes header, body;  // in the memory
    Link<Unexpected> match_link = {}, arrival_link = {};
};

class MatchQueue : core::NonCopyable {
public:
    ~MatchQueue();

    // Appends a receive, or a probe, that nothing has come for.
    void post(Request& receive);
    // Puts a receive back to where it was: the message it had matched was withdrawn.
    void post_again(Request& receive);
    void withdraw(Request& receive);
    // Takes out the receive that a message goes to; null if there is none.
    Request* take_posted(int source, std::uint32_t tag);

    // Takes out a probe that a message answers; null if there is none.
    Request* take_probe(int source, std::uint32_t tag);

    // Keeps a message that no receive takes.
    const Unexpected& keep(std::unique_ptr<Unexpected> message);
    // The message that a receive gets, which stays; null if there is none.
    Unexpected* find(const Request& receive) const;
    std::unique_ptr<Unexpected> take(Unexpected& message);
    // Takes out the announcement of a large message that was withdrawn; null if there is none.
    std::unique_ptr<Unexpected> take_rts(int source, std::uint64_t number);
    // The tags of the messages of a rank, in the order they came.
    std::vector<std::uint32_t> unexpected_tags(int source) const;

    std::size_t num_unexpected() const { return num_unexpected_; }

private:
    using Receives = List<Request, &Request::match_link>;
    struct Bucket {
        Receives posted;
        List<Unexpected, &Unexpected::match_link> unexpected;
        bool empty() const { return posted.empty() && unexpected.empty(); }
    };
    using Buckets = std::unordered_map<std::uint64_t, Bucket>;

    static std::uint64_t key(int source, std::uint32_t tag) {
        return static_cast<std::uint64_t>(static_cast<std::uint32_t>(source)) << 32 | tag;
    }
    Receives& list_of(const Request& receive);
    void drop_if_empty(Buckets::iterator bucket);

    Buckets buckets_;
    Receives wildcards_, probes_;
    List<Unexpected, &Unexpected::arrival_link> arrivals_;
    std::uint64_t last_order_ = 0;
    std::size_t num_unexpected_ = 0;
};

}  // namespace ferrodist::core
