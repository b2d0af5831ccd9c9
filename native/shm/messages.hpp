// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages: point to point between the ranks of a group that shares memory. What they mean is in core/.
//
// What a rank tells another stands in a queue of records in its own arena, one per pair. Data above the
// eager limit goes through a stream, of which there are a few per pair: a message that has been matched
// waits for one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/messages.hpp"
#include "shm/group.hpp"
#include "shm/progress.hpp"
#include "shm/queue.hpp"

namespace ferrodist::shm {

// How the data of one large message gets from the sender's memory to the receiver's. A payload in the sender's arena
// is copied from where it is. Any other goes through a ring of pieces in the arena, which the sender fills while the
// receiver empties it.
//
// In the sender's arena, before its ring. It ends when the receiver has all of it; the sender may break
// it before. It is over when the receiver has set `emptied` to `over`, whatever the stage: the receiver
// does not touch it any more.
struct alignas(2 * line) Stream {
    enum Stage : std::uint32_t { active, ended, broken };

    static constexpr std::uint32_t over = ~std::uint32_t{0};
    static constexpr std::size_t piece_nbytes = 64 * 1024;
    static constexpr std::uint32_t num_pieces = 32;
    static constexpr std::size_t ring_nbytes = num_pieces * piece_nbytes;
    static constexpr std::size_t ring_start = 4096;  // behind the stream

    Word stage;
    alignas(line) Word filled;   // pieces, counted by the sender
    alignas(line) Word emptied;  // pieces, counted by the receiver

    // All of these are seq_cst, for the doorbell that is rung after a change and slept on after a look.
    std::uint32_t stage_now() const { return stage.load(std::memory_order_seq_cst); }
    bool move(Stage from, Stage to) {  // pairs with the other side's move and stage_now
        std::uint32_t expected = from;
        return stage.compare_exchange_strong(expected, to, std::memory_order_seq_cst);
    }
    bool is_over() const {  // pairs with the receiver's last store to `emptied`
        return emptied.load(std::memory_order_seq_cst) == over;
    }
};

// What the receiver is told of it: offsets in the sender's arena.
struct DataPlace {
    std::uint64_t stream;
    std::uint64_t payload;  // 0: it goes through the ring
    // The piece of the ring it begins with: behind the message before, for lines that are still in the
    // receiver's cache are slow to write.
    std::uint64_t first_piece;
};

// A piece of a payload, and where it lies in the ring.
struct Piece {
    Piece(std::size_t nbytes_in_all, std::uint32_t index, std::uint32_t first)
        : start(index * Stream::piece_nbytes),
          nbytes(std::min(Stream::piece_nbytes, nbytes_in_all - start)),
          place((first + index) % Stream::num_pieces * Stream::piece_nbytes) {}

    std::size_t start, nbytes, place;
};

constexpr std::uint32_t count_pieces(std::size_t nbytes) {
    return static_cast<std::uint32_t>((nbytes + Stream::piece_nbytes - 1) / Stream::piece_nbytes);
}

// One per process and group; ends before the group does. Any number of threads may use it.
class Messages final : public core::Messages {
public:
    explicit Messages(Group& group);
    ~Messages() override;

    core::Status wait(core::Request& request, const core::WaitOptions& options, bool holds_caller) override;
    bool test(core::Request& request) override { return progress_.test(request); }
    void start_progress() override {
        const auto guard = progress_.lock();
        progress_.start();
    }
    // The cycle of sends that this rank's send to `peer` is part of, from its lowest rank on; or none.
    std::vector<int> find_send_cycle(int peer);

    // -- for Progress: with the lock held -----------------------------------------------------------

    // Reads what has come and moves data; tells whether there was any.
    bool advance();
    using core::Messages::check;
    // Whether something comes that nobody may wait for, such as data for a receive that was given up.
    bool has_unattended() const;
    using core::Messages::may_still_come;
    using core::Messages::next_deadline;
    std::uint64_t moves_of(const core::Request& request) const override;

protected:
    Lock lock() override { return progress_.lock(); }
    bool is_of_ancestor() const override { return group_.world().is_of_ancestor(); }
    std::uint64_t eager_received(int peer) override;
    void send_eager(core::Request& send, core::Bytes header) override;
    void send_rts(core::Request& send, core::Bytes header) override;
    void send_cts(int peer, std::uint64_t number) override { append(peer, Record::cts, number); }
    void send_taken(int peer, std::uint64_t number, core::StatusCode code) override {
        append(peer, Record::taken, number, static_cast<std::uint32_t>(code));
    }
    void send_withdraw(int peer, std::uint64_t number) override;
    void begin_data(core::Request& send) override;
    void end_data(core::Request& request) override;
    void count_moved(const core::Request& request) override;
    void count_received(int peer, std::uint64_t nbytes) override;
    void count_receives(int change) override;
    void read(int peer) override {
        while (advance(peer)) {
        }
    }
    void note_posted(const core::Request&) override { progress_.note_unattended(); }
    void note_completed() override { progress_.doorbell().ring(); }
    core::Status group_error() const override;
    bool is_gone(int peer) const override { return group_.is_gone(peer); }
    bool is_closing(int peer) const override;
    bool has_closed(int peer) const override;
    bool receives_no_more(int peer) const override;
    core::Status loss(int peer) const override { return {StatusCode::lost, peer}; }
    bool lacks_heartbeat(int peer) override;
    std::int64_t held_ns(int peer) const override { return group_.peer(peer).held_ns(); }

private:
    // A stream of this process, with its ring. Lasts as long as the group.
    struct Ring {
        std::size_t offset;
        Stream* stream;
        bool is_out = false;  // a send goes through it
        std::uint32_t next_piece = 0;
    };
    struct SendData final : core::Transfer {
        explicit SendData(Ring& its_ring) : ring(its_ring) {}
        Ring& ring;
        bool is_in_arena = false;
        std::uint32_t num_filled = 0, first_piece = 0;
    };
    struct ReceiveData final : core::Transfer {
        Stream* stream = nullptr;
        const std::byte* source = nullptr;
        bool is_in_arena = false;
        std::uint32_t num_emptied = 0, first_piece = 0;
    };
    // An eager message that is copied out while it is still being copied in.
    struct Partial {
        core::Request* receive;  // null: nobody wants it
        std::size_t num_copied = 0;
    };
    struct Peer {
        std::optional<QueueWriter> out;
        std::optional<QueueReader> in;
        std::optional<Partial> partial;
        bool is_corrupt = false;
        std::uint64_t num_received = 0;  // bytes of eager messages
        std::deque<Ring> rings;
        std::deque<core::Request*> waiting;  // sends for a ring
        std::vector<core::Request*> sending, receiving;
        std::vector<std::uint64_t> given_up;  // numbers of messages whose data is still to come
        HeartbeatTimer heartbeat_timeout;
        std::int64_t polled_ns = 0;
        std::int64_t told_ns = 0;  // when it was told last that there is no memory for what it sends
    };

    Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
    QueueWriter& out(int peer);
    void append(int peer, Record::Kind kind, std::uint64_t number, std::uint32_t tag = 0, ByteView header = {},
                ByteView body = {});
    bool advance(int peer);
    QueueReader* reader(int peer);
    bool read_records(int peer);
    bool read_one(int peer, const Message& message);
    void starve(int peer);
    bool read_long(int peer, const Message& message);
    bool go_on(int peer, const Message& message);
    void on_data(int peer, const Message& message);
    bool fill(core::Request& send);
    bool empty(core::Request& receive);
    bool serve_waiting(int peer);
    Ring* free_ring(int peer);
    void start_stream(core::Request& send, Ring& ring);
    void finish_stream(Stream& stream, int peer);
    void ring_doorbell(int peer) const { group_.peer(peer).header().doorbell.ring(); }

    Group& group_;
    Progress& progress_;
    std::deque<Peer> peers_;
    int next_peer_ = 0;  // who is read first
};

}  // namespace ferrodist::shm
