// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages: point to point between the ranks of a group over TCP. What they mean is in core/.
//
// Everything is a frame. Data above the eager limit travels as it is in the sender's memory, straight to
// its place in the receiver's. The lock is the mesh's, and so is the thread that makes progress while
// nobody waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/messages.hpp"
#include "net/mesh.hpp"

namespace ferrodist::net {

class Group;

class Messages final : public core::Messages {
public:
    Messages(Group& group, int size);
    ~Messages() override;

    core::Status wait(core::Request& request, const core::WaitOptions& options, bool holds_caller) override;
    bool test(core::Request& request) override;
    void poll() override;

    // -- for mesh and group: with the lock held -----------------------------------------------------

    std::byte* place_for(int peer, const Header& header);
    // `is_void`: there was no memory for the payload.
    void on_frame(int peer, const Header& header, Payload payload, bool is_void);
    // Ends the sends whose memory the kernel has all of.
    void finish_sent();
    // Ends all requests, as this rank's part in the group does.
    void end_all();
    using core::Messages::check;
    using core::Messages::has_in_flight;
    using core::Messages::next_deadline;

protected:
    Lock lock() override;
    bool is_of_ancestor() const override;
    std::uint64_t eager_received(int peer) override { return at(peer).num_acknowledged; }
    void send_eager(core::Request& send, core::Bytes header) override;
    void send_rts(core::Request& send, core::Bytes header) override;
    void send_cts(int peer, std::uint64_t number) override { send_frame(peer, FrameKind::cts, number); }
    void send_taken(int peer, std::uint64_t number, core::StatusCode code) override {
        send_frame(peer, FrameKind::taken, number, static_cast<std::uint64_t>(code));
    }
    void send_withdraw(int peer, std::uint64_t number) override;
    void begin_data(core::Request& send) override;
    void end_data(core::Request& request) override;
    void count_moved(const core::Request&) override {}  // links count
    void count_received(int peer, std::uint64_t nbytes) override;
    void count_receives(int change) override;
    void read(int) override {}  // the reader of a link hands on all that has come
    void note_posted(const core::Request& request) override;
    void note_completed() override;
    core::Status group_error() const override;
    bool is_gone(int peer) const override;
    bool is_closing(int peer) const override;
    bool has_closed(int peer) const override;
    bool receives_no_more(int peer) const override;
    core::Status loss(int peer) const override;
    bool lacks_heartbeat(int peer) override;
    std::int64_t held_ns(int peer) const override;
    std::uint64_t moves_of(const core::Request& request) const override;

private:
    struct SendData final : core::Transfer {
        Ticket ticket;
    };
    struct ReceiveData final : core::Transfer {
        std::size_t filled = 0;
    };
    struct Peer {
        std::uint64_t num_received = 0, num_told = 0;  // bytes of eager messages of this rank
        std::uint64_t num_acknowledged = 0;            // of ours, as it says
    };

    Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
    void send_frame(int peer, FrameKind kind, std::uint64_t number, std::uint64_t code = 0);
    void on_whole(int peer, const Header& header, Payload payload);
    void on_lost(int peer, const Header& header);
    void on_answer(int peer, const Header& header, const Payload& payload);
    void on_bulk(int peer, const Header& header, const Payload& payload);
    static ReceiveData& data_of(core::Request& receive);

    Group& group_;
    std::vector<Peer> peers_;
    std::vector<core::Request*> sending_;  // sends whose data is on its way
};

}  // namespace ferrodist::net
