// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/link.hpp"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>
#include <variant>

#include "core/memory.hpp"

namespace ferrodist::net {
namespace {

constexpr std::size_t staging_nbytes = 64 * 1024;
constexpr int socket_buffer_nbytes = 4 << 20;
constexpr std::size_t frames_at_once = 16;
constexpr std::size_t send_at_once = 1 << 17;  // what was just hashed is still in the cache
constexpr std::size_t pump_at_once = 4 << 20;  // then other links have their turn

// The address of one end of a TCP connection, without its port; empty if it is none.
std::string address(int socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    if (get_name(socket, reinterpret_cast<sockaddr*>(&name), &size) != 0) {
        return {};
    }
    const auto bytes_of = [](const auto& part) {
        return std::string(reinterpret_cast<const char*>(&part), sizeof part);
    };
    switch (name.ss_family) {
        case AF_INET: return bytes_of(reinterpret_cast<const sockaddr_in&>(name).sin_addr);
        case AF_INET6: return bytes_of(reinterpret_cast<const sockaddr_in6&>(name).sin6_addr);
        default: return {};
    }
}

}  // namespace

bool is_of_one_host(int socket) {
    const std::string mine = address(socket, ::getsockname);
    return !mine.empty() && mine == address(socket, ::getpeername);
}

Link::Link(int socket, Bytes session, std::uint32_t source, std::uint32_t peer, std::uint64_t piece)
    : socket_(socket), is_on_this_host_(is_of_one_host(socket)), out_key_(session, source), in_key_(session, peer),
      source_(source), peer_(peer), piece_(piece), staging_(staging_nbytes) {
    if (socket_ >= 0) {
        enlarge_buffers();
    }
}

Link::~Link() { close(); }

void Link::enlarge_buffers() const {
    // Twice as fast on loopback as what the kernel finds by itself; it may grant less.
    for (const int which : {SO_SNDBUF, SO_RCVBUF}) {
        ::setsockopt(socket_, SOL_SOCKET, which, &socket_buffer_nbytes, sizeof socket_buffer_nbytes);
    }
}

void Link::close() {
    if (socket_ >= 0) {
        ::close(std::exchange(socket_, -1));
    }
}

void Link::fail(State state, std::string why) {
    if (state_ == State::up) {
        flaw_ = std::move(why);
        state_ = state;
    }
    if (state == State::broken) {
        drop_outgoing();
    }
}

void Link::drop_outgoing() {
    for (std::deque<Outgoing>* queue : {&queue_, &urgent_}) {  // nobody need wait for it to go out
        for (Outgoing& frame : *queue) {
            if (frame.ticket != nullptr) {
                --frame.ticket->pending;
            }
        }
        queue->clear();
    }
    sent_ = 0;
    is_writable_ = false;
    is_finished_ = true;
}

// -- going out ------------------------------------------------------------------------------------

void Link::send_copy(const Header& header, Bytes payload, bool is_urgent) {
    if (socket_ < 0 || is_finished_) {
        return;
    }
    auto own = payload.empty() ? nullptr : new_memory(payload.size());
    if (own != nullptr) {
        std::memcpy(own.get(), payload.data(), payload.size());
    }
    const std::byte* data = own.get();
    (is_urgent ? urgent_ : queue_).push_back({header, data, payload.size(), std::move(own), nullptr});
}

void Link::send_in_place(const Header& header, Bytes payload, Ticket& ticket) {
    if (socket_ < 0 || is_finished_) {
        return;
    }
    ++ticket.pending;
    queue_.push_back({header, payload.data(), payload.size(), nullptr, &ticket});
}

void Link::seal(Outgoing& frame) {
    frame.header.source = source_;
    frame.header.number = ++num_sent_;
    frame.header.cpu = static_cast<std::uint16_t>(sched_getcpu() + 1);
    frame.header.length = frame.size;
    frame.header.digest = frame.size == 0 ? 0 : out_key_.digest({frame.data, frame.size});
    frame.bytes = encode(frame.header, out_key_);
    frame.is_sealed = true;
}

// The frame of which a part has gone out.
Link::Outgoing* Link::begun() {
    return sent_ == 0 ? nullptr : &(is_urgent_begun_ ? urgent_ : queue_).front();
}

void Link::flush() {
    while (is_writable_ && !is_idle() && socket_ >= 0) {
        std::array<iovec, 2 * frames_at_once> parts;
        std::size_t num_parts = 0, nbytes = 0;
        const auto add = [&](Outgoing& frame, std::size_t skip) {
            if (!frame.is_sealed) {
                seal(frame);
            }
            if (skip < header_nbytes) {
                parts[num_parts++] = {frame.bytes.data() + skip, header_nbytes - skip};
                nbytes += header_nbytes - skip;
                skip = header_nbytes;
            }
            if (const std::size_t done = skip - header_nbytes; done < frame.size) {
                parts[num_parts++] = {const_cast<std::byte*>(frame.data) + done, frame.size - done};
                nbytes += frame.size - done;
            }
        };
        // What goes out: the frame that has begun, then what is urgent and sealed already, then the
        // rest in order. A frame is sealed when it is offered to the kernel, so its number is its place.
        if (Outgoing* frame = begun()) {
            add(*frame, sent_);
        } else if (!queue_.empty() && queue_.front().is_sealed) {
            is_urgent_begun_ = false;
            add(queue_.front(), 0);
        } else if (!urgent_.empty()) {
            is_urgent_begun_ = true;
            add(urgent_.front(), 0);
        } else {
            is_urgent_begun_ = false;
            for (Outgoing& frame : queue_) {
                if (num_parts + 2 > parts.size() || nbytes >= send_at_once) {
                    break;
                }
                add(frame, 0);
            }
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = num_parts;
        const ssize_t sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
                is_writable_ = false;
                return;
            }
            // What the other side sent before it was gone is still to be read: then the link is broken.
            why_not_sent_ = std::string("the connection failed (") + std::strerror(errno) + ")";
            is_at_end_ = true;
            return drop_outgoing();
        }
        took(static_cast<std::size_t>(sent));
        if (static_cast<std::size_t>(sent) < nbytes) {
            is_writable_ = false;
        }
    }
}

// Counts off bytes that the kernel has taken.
void Link::took(std::size_t nbytes) {
    sent_nbytes_ += nbytes;
    std::deque<Outgoing>& queue = is_urgent_begun_ ? urgent_ : queue_;
    sent_ += nbytes;
    while (!queue.empty() && queue.front().is_sealed) {
        const std::size_t whole = header_nbytes + queue.front().size;
        if (sent_ < whole) {
            return;
        }
        sent_ -= whole;
        if (queue.front().ticket != nullptr) {
            --queue.front().ticket->pending;
        }
        queue.pop_front();
    }
}

std::uint64_t Link::detach(Ticket& ticket) {
    std::uint64_t dropped = 0;
    for (auto frame = queue_.begin(); frame != queue_.end();) {
        if (frame->ticket != &ticket) {
            ++frame;
        } else if (!frame->is_sealed) {
            dropped += frame->size;
            frame = queue_.erase(frame);
        } else {
            frame->ticket = nullptr;
            copy_rest(*frame++);
        }
    }
    ticket.pending = 0;
    if (std::any_of(queue_.begin(), queue_.end(), [](const Outgoing& one) { return one.is_lost; })) {
        fail(State::broken, "there was no memory to go on with a frame");
    }
    return dropped;
}

// Keeps what is left of a frame that the other side waits for.
void Link::copy_rest(Outgoing& frame) {
    if (frame.size == 0) {
        return;
    }
    try {
        frame.own = new_memory(frame.size);
    } catch (const std::bad_alloc&) {
        frame.is_lost = true;
        return;
    }
    std::memcpy(frame.own.get(), frame.data, frame.size);
    frame.data = frame.own.get();
}

void Link::finish() {
    if (socket_ >= 0 && !is_finished_) {
        is_finished_ = true;
        ::shutdown(socket_, SHUT_WR);
    }
}

std::uint64_t Link::num_undelivered() const {
    int waiting = 0;
    return socket_ < 0 || ::ioctl(socket_, SIOCOUTQ, &waiting) != 0 ? 0 : static_cast<std::uint64_t>(waiting);
}

bool Link::is_delivered() const {
    int waiting = 0;
    if (socket_ < 0 || state_ == State::broken || ::ioctl(socket_, SIOCOUTQ, &waiting) != 0 || waiting == 0) {
        return true;
    }
    // What a connection has not taken that was reset meanwhile, it never will.
    tcp_info info{};
    socklen_t size = sizeof info;
    return ::getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state == TCP_CLOSE;
}

// -- coming in ------------------------------------------------------------------------------------

bool Link::pump(FrameHandler& handler) {
    is_paused_ = false;
    parse_all(handler);  // what a pause has left
    for (std::size_t total = 0; state_ == State::up && socket_ >= 0;) {
        if (is_paused_) {
            return false;
        }
        if (begin_ == end_) {
            begin_ = end_ = 0;
        } else if (end_ == staging_.size()) {
            std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        // A payload that is under way goes to its place, and what is behind it to the staging: after a
        // large one only a header, for what follows is probably as large and need not be copied.
        const std::size_t rest = has_header_ && into_ != nullptr ? header_.length - filled_ : 0;
        const std::size_t room = header_.length >= large_payload && end_ - begin_ < header_nbytes
                                     ? std::min(header_nbytes - (end_ - begin_), staging_.size() - end_)
                                     : staging_.size() - end_;
        iovec parts[2] = {{rest == 0 ? nullptr : into_ + filled_, rest}, {staging_.data() + end_, room}};
        const bool is_direct = rest > 0;
        const ssize_t got = is_direct ? ::readv(socket_, parts, 2)
                                      : ::recv(socket_, parts[1].iov_base, parts[1].iov_len, MSG_DONTWAIT);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                if (!why_not_sent_.empty()) {
                    fail(State::broken, why_not_sent_);
                }
                return true;
            }
            fail(State::broken, std::string("the connection failed (") + std::strerror(errno) + ")");
            return true;
        }
        if (got == 0) {
            const bool is_broken = has_header_ || begin_ != end_ || !why_not_sent_.empty();
            fail(is_broken ? State::broken : State::ended, why_not_sent_.empty() ? "its connection ended" : why_not_sent_);
            return true;
        }
        const auto nbytes = static_cast<std::size_t>(got);
        const std::size_t asked = rest + parts[1].iov_len;
        received_nbytes_ += nbytes;
        total += nbytes;
        filled_ += is_direct ? std::min(rest, nbytes) : 0;
        end_ += is_direct ? nbytes - std::min(rest, nbytes) : nbytes;
        parse_all(handler);
        if (nbytes < asked && !is_at_end_) {
            return !is_paused_ || !has_frame();
        }
        if (total >= pump_at_once) {
            return false;
        }
    }
    return true;
}

void Link::parse_all(FrameHandler& handler) {
    try {
        parse(handler);
    } catch (const std::bad_alloc&) {
        fail(State::corrupt, "no memory for a message of " + std::to_string(header_.length) + " bytes");
    }
}

// Takes frames out of what has been read.
void Link::parse(FrameHandler& handler) {
    while (state_ == State::up && !is_paused_) {
        if (!has_header_ && !begin_payload(handler)) {
            return;
        }
        const std::size_t part = std::min(header_.length - filled_, end_ - begin_);
        if (part > 0) {
            if (into_ != nullptr) {  // else there was no memory for it
                std::memcpy(into_ + filled_, staging_.data() + begin_, part);
            }
            filled_ += part;
            begin_ += part;
        }
        if (filled_ < header_.length || !end_payload(handler)) {
            return;
        }
    }
}

// Reads a header; false if it is not there yet, or is none.
bool Link::begin_payload(FrameHandler& handler) {
    if (!has_frame()) {
        return false;
    }
    const auto found = decode(staging_.data() + begin_, in_key_, peer_, num_received_ + 1, piece_);
    if (const Flaw* flaw = std::get_if<Flaw>(&found)) {
        fail(State::corrupt, std::string(*flaw));
        return false;
    }
    header_ = std::get<Header>(found);
    begin_ += header_nbytes;
    ++num_received_;
    has_header_ = true;
    is_void_ = false;
    filled_ = 0;
    into_ = header_.length == 0 ? nullptr : handler.place_for(static_cast<int>(peer_), header_);
    payload_ = {nullptr, header_.length};
    if (into_ == nullptr && header_.length > 0) {
        make_room();
    }
    return true;
}

// Makes room for a payload. One without which the link can go on is left out if there is none.
void Link::make_room() {
    const bool is_message = header_.kind == FrameKind::eager || header_.kind == FrameKind::rts;
    try {
        if (is_message) {
            core::require_memory(header_.length);
        }
        payload_.memory = new_memory(header_.length);
        into_ = payload_.memory.get();
    } catch (const std::bad_alloc&) {
        if (!is_message) {
            throw;
        }
        is_void_ = true;
    }
}

// A payload is complete: checks it and hands it on.
bool Link::end_payload(FrameHandler& handler) {
    const bool is_right = is_void_ || header_.length == 0 ||
                          in_key_.digest({into_, header_.length}) == header_.digest;
    has_header_ = false;
    if (!is_right) {
        fail(State::corrupt, "the digest does not fit the payload");
        return false;
    }
    handler.on_frame(static_cast<int>(peer_), header_, std::move(payload_), is_void_);
    into_ = nullptr;
    return true;
}

void Link::give_up_place(const std::byte* begin, std::size_t size) {
    if (!has_header_ || payload_.memory != nullptr || into_ < begin || into_ >= begin + size) {
        return;
    }
    is_void_ = true;
    try {
        payload_.memory = new_memory(header_.length);
    } catch (const std::bad_alloc&) {
        has_header_ = false;
        return fail(State::corrupt, "no memory for the rest of a message");
    }
    into_ = payload_.memory.get();
}

}  // namespace ferrodist::net
