// SPDX-License-Identifier: MIT OR Apache-2.0
// Link: one connection to one other rank, as a queue of frames that go out and a parser of those that
// come in. Never waits: what the kernel does not take stays in the queue. Not safe for several
// threads: the Mesh, which owns all links, holds its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/noncopyable.hpp"
#include "core/memory.hpp"
#include "net/frame.hpp"

namespace ferrodist::net {

using core::Memory;
using core::new_memory;

constexpr std::size_t large_payload = 32 * 1024;  // not worth to be copied once more

// Counts frames whose payload is the caller's memory and not yet with the kernel.
struct Ticket {
    std::size_t pending = 0;
};

// The payload of a frame that has arrived: in memory of its own, unless it went to its place at once.
struct Payload {
    Memory memory;  // null if it is in its place
    std::size_t size = 0;

    Bytes bytes() const { return {memory.get(), size}; }
};

// Hears of frames.
class FrameHandler {
public:
    virtual ~FrameHandler() = default;
    // Where the payload of a frame is to go; null for memory of its own.
    virtual std::byte* place_for(int peer, const Header& header) = 0;
    // A frame has arrived whole and is what was sent; `is_void` if its place was given up meanwhile, or
    // there was no memory for it.
    virtual void on_frame(int peer, const Header& header, Payload payload, bool is_void) = 0;
};

// Whether both ends of a TCP connection are on this host, by their addresses.
bool is_of_one_host(int socket);

class Link : core::NonCopyable {
public:
    enum class State {
        up,
        ended,    // the other side has ended it in order, after all it had sent
        broken,   // the connection failed
        corrupt,  // bytes came that cannot be right; what goes out still may
    };

    // Takes the socket over. `source` is this rank, `peer` the other.
    Link(int socket, Bytes session, std::uint32_t source, std::uint32_t peer, std::uint64_t piece);
    ~Link();

    int socket() const { return socket_; }
    bool is_on_this_host() const { return is_on_this_host_; }
    // The number + 1 of the CPU that the other side ran on when it sent the last frame that has begun; 0: none yet.
    std::uint32_t peer_cpu() const { return header_.cpu; }
    State state() const { return state_; }
    bool is_up() const { return state_ == State::up; }
    // Why it is not up, as a clause about the other side.
    const std::string& flaw() const { return flaw_; }

    // -- going out ------------------------------------------------------------------------------

    // Queues a frame with a copy of its payload. Urgent ones overtake all that have not begun.
    void send_copy(const Header& header, Bytes payload, bool is_urgent);
    // Queues a frame whose payload is not copied: it must not change while the ticket counts it.
    void send_in_place(const Header& header, Bytes payload, Ticket& ticket);
    // Hands to the kernel what it takes.
    void flush();
    // The kernel takes more again.
    void set_writable() { is_writable_ = !is_finished_; }
    // Lets go of the memory of a ticket: frames that have not begun are not sent at all. Gives how many
    // bytes of payload that were.
    std::uint64_t detach(Ticket& ticket);
    bool is_idle() const { return queue_.empty() && urgent_.empty(); }
    std::uint64_t num_sent() const { return num_sent_; }
    std::uint64_t sent_nbytes() const { return sent_nbytes_; }

    // -- coming in ------------------------------------------------------------------------------

    // Reads what there is; false if there may be more than it read at one go.
    bool pump(FrameHandler& handler);
    // Ends the reading that is going on behind this frame: somebody has work with it, while it is cached.
    void pause() { is_paused_ = true; }
    // The other side has ended or failed: there is something to be read up to the end.
    void note_end() { is_at_end_ = true; }
    // Takes nothing more from the other side, for what it sends cannot be right.
    void refuse(std::string why) { fail(State::corrupt, std::move(why)); }
    // Gives up the place that a payload is going to; what is left of it goes nowhere.
    void give_up_place(const std::byte* begin, std::size_t size);
    std::uint64_t received_nbytes() const { return received_nbytes_; }
    // How much of a piece of this group has come that is on its way.
    std::size_t num_filled(std::uint64_t group) const {
        return has_header_ && header_.kind == FrameKind::data && header_.group == group ? filled_ : 0;
    }

    // Ends the connection: no more goes out. The other side hears it after all that was sent.
    void finish();
    // Bytes that this kernel has and the other side's has not.
    std::uint64_t num_undelivered() const;
    // Tells whether the other side's kernel has everything.
    bool is_delivered() const;
    void close();

private:
    struct Outgoing {
        Header header;
        const std::byte* data;
        std::size_t size;
        Memory own;
        Ticket* ticket;
        bool is_sealed = false, is_lost = false;
        HeaderBytes bytes{};
    };

    void enlarge_buffers() const;
    void copy_rest(Outgoing& frame);
    void seal(Outgoing& frame);
    void took(std::size_t nbytes);
    Outgoing* begun();
    void parse(FrameHandler& handler);
    bool begin_payload(FrameHandler& handler);
    void make_room();
    bool end_payload(FrameHandler& handler);
    void parse_all(FrameHandler& handler);
    bool has_frame() const { return end_ - begin_ >= header_nbytes; }
    void fail(State state, std::string why);
    void drop_outgoing();

    int socket_;
    bool is_on_this_host_;
    FrameKey out_key_, in_key_;
    std::uint32_t source_, peer_;
    std::uint64_t piece_;
    State state_ = State::up;
    std::string flaw_, why_not_sent_;

    std::deque<Outgoing> queue_, urgent_;
    bool is_urgent_begun_ = false;  // a frame of the urgent queue, not of the other, is on its way
    std::size_t sent_ = 0;          // bytes of the frame that is on its way
    std::uint64_t num_sent_ = 0, sent_nbytes_ = 0;
    bool is_writable_ = true, is_finished_ = false;

    std::vector<std::byte> staging_;
    std::size_t begin_ = 0, end_ = 0;  // what of the staging holds bytes not yet looked at
    bool has_header_ = false, is_void_ = false, is_at_end_ = false, is_paused_ = false;
    Header header_;
    Payload payload_;
    std::byte* into_ = nullptr;
    std::size_t filled_ = 0;
    std::uint64_t num_received_ = 0, received_nbytes_ = 0;
};

}  // namespace ferrodist::net
