// SPDX-License-Identifier: MIT OR Apache-2.0
// What the others say.
#include <algorithm>

#include "fuzz/job.hpp"

namespace ferrodist::fuzz {

using net::FrameKind;

// A number that means something to the rank, or may.
std::uint64_t Job::number() {
    if (!sent_.empty() && script_.one_in(2)) {
        return sent().request.number;
    }
    return script_.one_in(2) ? sequence_ + script_.below(2) : script_.number();
}

Voice& Job::voice() { return *voices_[script_.below(voices_.size())]; }

void Job::say_frame() {
    net::Header header;
    header.kind = static_cast<FrameKind>(script_.below(static_cast<std::size_t>(FrameKind::last) + 2));
    header.group = script_.one_in(3) ? 5 : script_.one_in(16) ? script_.number() : 0;
    header.tag = tag();
    header.sequence = number();
    header.fingerprint = header.kind == FrameKind::rts && script_.one_in(2) ? large : script_.number();
    Voice& one = voice();
    one.say(script_, header, payload_of(header.kind));
}

Buffer Job::payload_of(FrameKind kind) {
    if (kind == FrameKind::join || kind == FrameKind::ring) {
        return script_.one_in(4) ? script_.bytes(script_.size()) : members();
    }
    if (kind == FrameKind::eager && !script_.one_in(4)) {  // a message with a header, or a part of one
        Buffer payload{static_cast<std::byte>(script_.below(12)), std::byte{0}};
        const Buffer rest = script_.bytes(script_.size());
        payload.insert(payload.end(), rest.begin(), rest.end());
        return payload;
    }
    if (kind == FrameKind::data || kind == FrameKind::bulk) {
        return Buffer(std::min<std::size_t>(script_.size(), piece), std::byte{7});
    }
    const bool has_none = net::longest_payload(kind, piece) == 0;
    return has_none && !script_.one_in(16) ? Buffer{} : script_.bytes(script_.size());
}

Buffer Job::members() {
    std::vector<std::int32_t> list(script_.below(5));
    for (std::int32_t& one : list) {
        one = script_.one_in(8) ? static_cast<std::int32_t>(script_.number()) : static_cast<std::int32_t>(script_.below(3));
    }
    const net::Bytes bytes = std::as_bytes(std::span(list));
    return {bytes.begin(), bytes.end()};
}

}  // namespace ferrodist::fuzz
