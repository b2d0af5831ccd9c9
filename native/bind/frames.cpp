// SPDX-License-Identifier: MIT OR Apache-2.0
// Whole frames as bytes, for links that Python makes up: net/frame.hpp says what they look like.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <string>
#include <tuple>
#include <variant>

#include "bind/hooks.hpp"
#include "bind/python.hpp"
#include "net/frame.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using net::FrameKey;
using net::Header;

FrameKey key_of(const nb::bytes& session, std::uint32_t source) {
    require(session.size() == FrameKey::session_nbytes, "a key has 32 bytes");
    return {bytes_of(session), source};
}

std::uint64_t digest_of(Bytes payload, const FrameKey& key) { return payload.empty() ? 0 : key.digest(payload); }

[[noreturn]] void refuse(const std::string& flaw) { throw nb::value_error(flaw.c_str()); }

nb::bytearray encode_frame(std::uint8_t kind, std::uint64_t group, std::uint64_t sequence,
                           std::uint64_t fingerprint, std::uint32_t tag, nb::handle payload,
                           const nb::bytes& key, std::uint32_t source, std::uint64_t number) {
    const View view = readable(payload);
    const Bytes content = view.bytes();
    const FrameKey keyed = key_of(key, source);
    Header header{.kind = static_cast<net::FrameKind>(kind), .source = source, .tag = tag, .group = group,
                  .sequence = sequence, .fingerprint = fingerprint, .number = number};
    header.length = content.size();
    header.digest = digest_of(content, keyed);
    const net::HeaderBytes head = net::encode(header, keyed);
    nb::bytearray frame;
    frame.resize(head.size() + content.size());
    auto* const into = static_cast<std::byte*>(frame.data());
    std::memcpy(into, head.data(), head.size());
    if (!content.empty()) {
        std::memcpy(into + head.size(), content.data(), content.size());
    }
    return frame;
}

// What of an object lies behind its first bytes, in place.
nb::object rest_of(nb::handle data, std::size_t begin) {
    return checked(PyMemoryView_FromObject(data.ptr()))[nb::slice(nb::int_(begin), nb::none(), nb::none())];
}

// kind, group, sequence, fingerprint, tag, payload
using Found = std::tuple<int, std::uint64_t, std::uint64_t, std::uint64_t, std::uint32_t, nb::object>;

Found decode_frame(nb::handle data, const nb::bytes& key, std::uint32_t source, std::uint64_t number,
                   std::uint64_t piece_nbytes) {
    const View view = readable(data);
    const Bytes frame = view.bytes();
    if (frame.size() < net::header_nbytes) {
        refuse(std::to_string(frame.size()) + " bytes are too few for a frame");
    }
    const FrameKey keyed = key_of(key, source);
    const auto found = net::decode(frame.data(), keyed, source, number, piece_nbytes);
    if (const net::Flaw* flaw = std::get_if<net::Flaw>(&found)) {
        refuse(std::string(*flaw));
    }
    const Header& header = std::get<Header>(found);
    const Bytes payload = frame.subspan(net::header_nbytes);
    if (header.length != payload.size()) {
        refuse("a payload of " + std::to_string(payload.size()) + " bytes, not " + std::to_string(header.length));
    }
    if (header.digest != digest_of(payload, keyed)) {
        refuse("the digest does not fit the payload");
    }
    return {static_cast<int>(header.kind), header.group, header.sequence, header.fingerprint, header.tag,
            rest_of(data, net::header_nbytes)};
}

}  // namespace

void add_frames(nb::module_& module) {
    module.def("encode_frame", &encode_frame, "kind"_a, "group"_a, "sequence"_a, "fingerprint"_a, "tag"_a,
               "payload"_a, "key"_a, "source"_a, "number"_a,
               "Lay a frame out as bytes, signed with a key of 32 bytes.");
    module.def("decode_frame", &decode_frame, "data"_a, "key"_a, "source"_a, "number"_a, "piece_nbytes"_a,
               "Check a frame; return kind, group, sequence, fingerprint, tag and payload.");
}

}  // namespace ferrodist::bind
