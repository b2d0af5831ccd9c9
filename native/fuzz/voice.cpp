// SPDX-License-Identifier: MIT OR Apache-2.0
#include "fuzz/voice.hpp"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace ferrodist::fuzz {

Voice::Voice(int socket, net::Bytes session, std::uint32_t rank, std::function<void()> make_room)
    : socket_(socket), key_(session, rank), rank_(rank), make_room_(std::move(make_room)) {}

void Voice::hang_up() {
    if (socket_ >= 0) {
        ::close(std::exchange(socket_, -1));
    }
}

void Voice::end_speech() {
    if (socket_ >= 0) {
        ::shutdown(socket_, SHUT_WR);
    }
}

Buffer Voice::encode(net::Header header, const Buffer& payload) {
    header.source = rank_;
    header.number = ++number_;
    header.length = payload.size();
    header.digest = payload.empty() ? 0 : key_.digest(payload);
    const net::HeaderBytes head = net::encode(header, key_);
    Buffer bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return bytes;
}

void Voice::say(net::Header header, const Buffer& payload) {
    go_on();
    write(encode(header, payload));
}

void Voice::say(Script& script, net::Header header, const Buffer& payload) {
    go_on();
    Buffer bytes = encode(header, payload);
    switch (script.below(32)) {
        case 0: {  // a header that lies about what is behind it, under a seal that is right
            header.source = rank_ + static_cast<std::uint32_t>(script.one_in(4));
            header.number = number_ + script.one_in(4);
            header.length = script.number();
            header.digest = script.number();
            header.cpu = static_cast<std::uint16_t>(script.number());
            const net::HeaderBytes head = net::encode(header, key_);
            bytes.assign(head.begin(), head.end());
            bytes.insert(bytes.end(), payload.begin(), payload.end());
            is_in_step_ = false;
            break;
        }
        case 1:  // a bit that is another one
            is_in_step_ = false;
            bytes[script.number() % bytes.size()] ^= std::byte(1 << script.below(8));
            break;
        case 2:
        case 3:
        case 4: {  // a part of it, for now
            const auto part = static_cast<std::ptrdiff_t>(script.number() * 13 % bytes.size());
            held_back_.assign(bytes.begin() + part, bytes.end());
            bytes.erase(bytes.begin() + part, bytes.end());
            break;
        }
        default:
            break;
    }
    write(bytes);
}

void Voice::go_on() { write(std::exchange(held_back_, {})); }

void Voice::listen() {
    std::array<std::byte, 65536> nothing;
    while (socket_ >= 0 && ::recv(socket_, nothing.data(), nothing.size(), MSG_DONTWAIT) > 0) {
    }
}

void Voice::write(const Buffer& bytes) {
    int num_tries = 0;
    for (std::size_t done = 0; done < bytes.size() && socket_ >= 0;) {
        const ssize_t sent = ::send(socket_, bytes.data() + done, bytes.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            done += static_cast<std::size_t>(sent);
            continue;
        }
        if (sent < 0 && errno != EAGAIN) {
            return hang_up();
        }
        if (++num_tries > 20) {  // nobody reads it any more
            is_in_step_ = false;
            return;
        }
        make_room_();
    }
}

}  // namespace ferrodist::fuzz
