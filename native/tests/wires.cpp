// SPDX-License-Identifier: MIT OR Apache-2.0
#include "wires.hpp"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "check.hpp"

namespace ferrodist::net {

std::ostream& operator<<(std::ostream& stream, Link::State state) {
    constexpr const char* names[] = {"up", "ended", "broken", "corrupt"};
    return stream << names[static_cast<int>(state)];
}

std::ostream& operator<<(std::ostream& stream, FrameKind kind) {
    return stream << "kind " << static_cast<int>(kind);
}

}  // namespace ferrodist::net

namespace ferrodist::tests {

using net::Link;

Buffer random_bytes(std::size_t size, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Buffer bytes(size);
    for (std::byte& one : bytes) {
        one = static_cast<std::byte>(random());
    }
    return bytes;
}

Buffer session_of(int one, int other) {
    const auto [low, high] = std::minmax(one, other);
    return random_bytes(net::FrameKey::session_nbytes, static_cast<std::uint64_t>(1000 * low + high));
}

Ends connect_ends() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
        throw std::system_error(errno, std::generic_category(), "socketpair");
    }
    return {ends[0], ends[1]};
}

void shrink_buffers(int socket) {
    constexpr int smallest = 1;  // the kernel makes of it what it must
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &smallest, sizeof smallest);
}

// -- collecting -----------------------------------------------------------------------------------

std::byte* Collector::place_for(int, const net::Header& header) {
    asked.push_back(header.length);
    return last_place_ = place(header);
}

void Collector::on_frame(int, const net::Header& header, net::Payload payload, bool is_void) {
    const bool was_placed = header.length > 0 && payload.memory == nullptr;
    const std::byte* begin = was_placed ? last_place_ : payload.memory.get();
    frames.push_back({header, is_void ? Buffer{} : Buffer(begin, begin + header.length), is_void, was_placed});
}

// -- the wire -------------------------------------------------------------------------------------

Wire::Wire(std::uint64_t seed) : Wire(connect_ends(), connect_ends(), seed) {}

Wire::Wire(Ends first, Ends second, std::uint64_t seed)
    : one(first.left, session_of(0, 1), 0, 1, piece), two(second.left, session_of(0, 1), 1, 0, piece),
      near_one_(first.right), near_two_(second.right), random_(seed) {
    for (const int socket : {first.left, first.right, second.left, second.right}) {
        shrink_buffers(socket);
    }
}

Wire::~Wire() {
    hang_up_one();
    ::close(near_two_);
}

void Wire::hang_up_one() {
    if (near_one_ >= 0) {
        move(near_one_, near_two_, to_two_, true, SIZE_MAX);
        ::shutdown(near_two_, SHUT_WR);
        ::close(std::exchange(near_one_, -1));
    }
}

void Wire::move(int from, int to, Buffer& waiting, bool is_harmed, std::size_t most) {
    Buffer portion(std::min<std::size_t>(most, 1 << 20));
    const ssize_t got = ::recv(from, portion.data(), portion.size(), MSG_DONTWAIT);
    if (got == 0 && waiting.empty()) {
        ::shutdown(to, SHUT_WR);
        return;
    }
    if (got > 0) {
        portion.resize(static_cast<std::size_t>(got));
        if (is_harmed) {
            harm(portion);
        }
        waiting.insert(waiting.end(), portion.begin(), portion.end());
    }
    const ssize_t sent = ::send(to, waiting.data(), std::min(most, waiting.size()), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
        waiting.erase(waiting.begin(), waiting.begin() + sent);
    }
}

void Wire::carry(std::size_t most) {
    const auto portion = [&] { return 1 + random_() % (random_() % 4 == 0 ? 100 : most); };
    for (Link* link : {&one, &two}) {
        link->set_writable();
        link->flush();
    }
    if (near_one_ >= 0) {
        move(near_one_, near_two_, to_two_, true, portion());
        move(near_two_, near_one_, to_one_, false, portion());
    }
    one.pump(heard_by_one);
    two.pump(heard_by_two);
}

void Wire::carry_all() {
    // What one side has handed to the kernel has arrived when the other has counted as many bytes.
    const auto has_all = [](const Link& from, const Link& to) {
        return !to.is_up() || (from.is_idle() && from.sent_nbytes() == to.received_nbytes());
    };
    while (!has_all(one, two) || !has_all(two, one)) {
        carry();
    }
}

void send(Link& link, const Buffer& payload, std::uint64_t sequence, bool is_urgent, net::FrameKind kind) {
    link.send_copy({.kind = kind, .sequence = sequence}, payload, is_urgent);
}

Buffer frame_bytes(net::Header header, const Buffer& payload, const net::FrameKey& key) {
    header.length = payload.size();
    header.digest = payload.empty() ? 0 : key.digest(payload);
    const net::HeaderBytes head = net::encode(header, key);
    Buffer bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return bytes;
}

}  // namespace ferrodist::tests
