// SPDX-License-Identifier: MIT OR Apache-2.0
// Group: ranks that do collectives over a mesh: the pieces they send each other, who has left, and
// what was decided about calls that cannot succeed.
//
// Its lowest rank that is still there is the *coordinator* of its group errors, in the thread of its mesh: the
// first one proposed for a call stands, and all get it from there. When ranks differ in a call, a rank
// that finds out tells it; it asks all for their calls and hands everybody all of them.
//
// *Barring*: who wants to give a call up at its deadline asks all ranks whether they have entered it. Whose
// thread is asked answers: yes, or that it is barred from now on: then that rank takes no part in the call any
// more. Either is final, under the lock of its mesh, so all who ask get the same answers. If one is barred, nobody
// can have finished the call (all have to hear of all), and the group error that names the barred ranks concerns
// all alike. A rank that does not answer (stopped, or its host is gone) cannot bar itself: the others are asked to
// refuse its pieces. If none of them has had one of this call, nobody can finish it: the rank counts as barred. If
// one has, the rank has entered. Once all have entered, a deadline ends a call only if nothing has moved on any
// rank between two questions. Before ranks are barred, a patient wait asks who is missing, and goes on while none of them
// has been held in another call for long: that is in their heartbeats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/mesh.hpp"
#include "net/messages.hpp"

namespace ferrodist::net {

// Where a piece that is awaited goes.
struct Place {
    std::byte* into;
    std::size_t size;
};

// What a rank was last heard to do.
struct RankStatus {
    std::uint64_t poll = 0;
    std::uint64_t sequence = 0;
    std::uint64_t barred_from = UINT64_MAX;  // the first call that it takes no part in
    std::uint64_t num_moves = 0;  // of bytes and calls in this group: it changes as long as something does
    std::uint32_t kind = 0;
    std::uint32_t is_inside = 0;
    std::int32_t waiting_for = -1;
    std::int32_t sending_to = -1;
};

constexpr int waits_elsewhere = -2;  // for none of the ranks, and yet is not stuck

class Group : core::NonCopyable {
public:
    struct GroupError {
        std::uint64_t sequence;
        std::string text;
    };

    // `members` are world ranks. With the lock of the mesh held.
    Group(std::shared_ptr<Mesh> mesh, std::uint64_t id, std::vector<int> members, std::shared_ptr<Group> parent);
    ~Group();

    Mesh& mesh() const { return *mesh_; }
    const std::shared_ptr<Mesh>& shared_mesh() const { return mesh_; }
    std::uint64_t id() const { return id_; }
    int rank() const { return rank_; }
    int size() const { return static_cast<int>(members_.size()); }
    const std::vector<int>& members() const { return members_; }
    int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
    // The rank in this group of a rank of the world; -1 if it is not a member.
    int rank_of(int world_rank) const;

    // -- pieces of collectives: with the lock held, one call at a time --------------------------

    // Enters a call; an ending if there is nothing to be won in it.
    Status enter(std::uint64_t sequence, std::uint32_t kind, std::uint64_t fingerprint);
    void exit() { own_status_.is_inside = 0; }
    // Whether so many bytes may go to a rank now.
    bool has_window(int peer, std::uint64_t nbytes) const;
    // Sends a piece from memory that must not change while the ticket counts it.
    void send_piece(int peer, Bytes piece, Ticket& ticket);
    // Lets go of the memory of pieces that are not with the kernel yet.
    void take_back_pieces(int peer, Ticket& ticket);
    // Says where the next piece of a rank goes, after those that are expected already.
    void expect(int peer, std::byte* into, std::size_t size) { peer_of(peer).places.push_back({into, size}); }
    // How many pieces have come to the places said for them.
    std::size_t num_here(int peer) { return peer_of(peer).num_filled; }
    bool has_piece(int peer) { return !peer_of(peer).pieces.empty(); }
    // Takes a piece that was not expected when it came, as far as there is one; empty memory if it is
    // no piece of this size: then `flaw` says what is wrong.
    std::optional<Payload> take_piece(int peer, std::size_t size, Status& flaw);
    // Ends all expectations, fulfilled or not.
    void forget(int peer);
    // What stands in the way of a call that waits for a rank, or for nobody (-1).
    Status trouble(int peer);
    // The same for what takes longer to find; tells the coordinator that this rank waits, and in what.
    Status slow_trouble();
    // The deadline of the current call is over: late if a rank is barred from it, or if nothing moves any more;
    // then missing() names who. Otherwise, also because of its patience, the call goes on, and the deadline is put off.
    // The lock is let go of.
    Status expire(Lock& lock, const WaitOptions& options);
    // Whether it was given up for ranks that are barred.
    bool has_barred() const { return has_barred_; }
    void note_wait(int peer, std::int64_t ns) { peer_of(peer).waited_ns += ns; }
    void set_waiting_for(int peer) {
        own_status_.waiting_for = peer;
        last_awaited_ = peer >= 0 ? peer : last_awaited_;
    }

    // -- who is there: with the lock held -------------------------------------------------------

    bool has_left(int rank) const { return peers_[static_cast<std::size_t>(rank)].has_left; }
    bool is_gone(int rank) const { return has_left(rank) || !mesh_->is_up(world_rank(rank)); }
    bool sends_no_more(int rank) const { return is_gone(rank) || peers_[static_cast<std::size_t>(rank)].is_closing; }
    bool has_closed(int rank) const { return peers_[static_cast<std::size_t>(rank)].is_closing; }
    bool takes_no_more(int rank) const;
    // A receive has been posted (1), or is over (-1).
    void count_receives(int change);
    // How the absence of a rank ends a wait: lost, or corrupt.
    Status loss(int rank) const;
    // The group error of a call, or an abort of a group around this one.
    const GroupError* find_error(std::uint64_t sequence) const;

    // -- without it -----------------------------------------------------------------------------

    std::optional<std::string> group_error(std::uint64_t sequence);
    // What stands in the way of a call that waits for something else than pieces.
    Status poll_all();
    // A member gives a group up before all have it: those that have it fail with this error in their first call, and do
    // not take it for the loss of the member. It waits for no answer, for others may not have the group yet.
    void give_up_split(std::string_view text);
    // The first group error of this group alone.
    std::optional<std::string> own_error();
    // Proposes a group error and waits, for a second at most, for the one that stands.
    bool set_error(std::uint64_t sequence, std::string_view text);
    // Tells what this rank has called and hears what all have.
    Status exchange_descriptors(std::uint64_t sequence, Bytes descriptor, const WaitOptions& options,
                    std::vector<std::string>& descriptors);
    // Asks all ranks what they do; those that have not come to this rank's call, or else those that
    // the others wait for.
    std::vector<int> missing();
    std::pair<std::uint64_t, std::uint32_t> last_call(int rank);
    void announce_closing();
    void leave(std::string_view leave_reason, std::uint64_t after);
    bool has_left();
    std::optional<std::string> leave_reason_of(int rank);
    std::string flaw_of(int rank);
    // How long this rank has waited for another; of other ranks nothing is known.
    std::int64_t waited_ns(int rank, int for_rank);
    std::vector<int> find_send_cycle(int peer);

    // Whether ranks take part in calls without sending pieces, so that it shows elsewhere if one that died
    // is still needed.
    bool leaves_deaths = false;

    Messages& messages() { return messages_; }
    // A send that holds its caller begins to wait for its receiver.
    void begin_send(int peer) {
        own_status_.sending_to = peer;
        ring_.clear();
    }
    void set_sending_to(int peer) { own_status_.sending_to = peer; }

    // -- frames: called by the mesh, with the lock held -----------------------------------------

    std::byte* place_for(int world_rank, const Header& header);
    void on_frame(int world_rank, const Header& header, Payload payload, bool is_void);
    // A rank that had come to this group has given it up before all were there.
    void on_unjoin(int world_rank);
    // Sends a frame of this group to a rank of it.
    void send(int rank, Header header, Bytes payload = {}, bool is_urgent = false);
    void send_to_all(const Header& header, Bytes payload = {}, bool is_urgent = false);

private:
    struct Piece {
        std::uint64_t sequence, fingerprint;
        Payload payload;
    };
    struct Peer {
        std::deque<Piece> pieces;  // that came before they were expected
        std::uint64_t kept_nbytes = 0;
        std::vector<Place> places;  // where those go that are expected
        std::size_t num_filled = 0;
        std::uint64_t sent = 0, credited = 0;       // bytes of pieces to this rank
        std::uint64_t consumed = 0, told = 0;       // bytes of pieces from it
        bool has_left = false, is_closing = false;
        std::uint64_t left_after = 0, num_receives = 0;
        std::string leave_reason;
        std::int64_t waited_ns = 0;
        std::uint64_t seen = 0;  // the last call of which a piece has come
        RankStatus rank_status;
        std::vector<std::uint64_t> has_seen;  // the same of each rank, as this one answered
        std::uint64_t refused_from = UINT64_MAX;  // pieces of this call and later ones are dropped
        std::uint64_t reported = 0, reported_fingerprint = 0;  // the call it waits in, as the coordinator hears
    };

    Peer& peer_of(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
    const Peer& peer_of(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
    void keep_piece(int rank, Piece piece);
    Payload take_first(Peer& from);
    void drop_old(Peer& peer, int rank);
    void consume(int rank, std::uint64_t nbytes);
    Place* next_place(int rank, const Header& header);
    void on_piece(int rank, const Header& header, Payload payload, bool is_void);
    int coordinator() const;
    void on_propose(std::uint64_t sequence, Bytes text);
    void on_differ(int rank, std::uint64_t sequence, Payload payload);
    void on_descriptor(const Header& header, Bytes text);
    void on_report(int rank, std::uint64_t sequence, std::uint64_t fingerprint);
    void ask_all(std::uint64_t sequence);
    void on_ring(Bytes payload);
    void on_poll(int rank, std::uint64_t poll);
    void on_bar(int rank, const Header& header, Bytes payload);
    void on_rank_status(int rank, Bytes payload);
    void poll_all(Lock& lock);
    std::vector<int> ask_in_call(Lock& lock, const std::vector<int>& refused);
    std::vector<int> find_barred(const std::vector<int>& silent) const;
    std::vector<int> find_missing() const;
    bool is_refused(int rank) const;
    void refuse(int rank, std::uint64_t sequence);
    std::uint64_t moves_here() const;
    std::uint64_t count_moves(std::uint64_t here) const;
    Status give_up(std::vector<int> missing, bool are_barred);
    bool may_still_come(Lock& lock, const WaitOptions& options);
    // Ranks differ in a call, which may be one that this rank has yet to come to: then a piece of the call before, which
    // comes late, must not make it forget that.
    void note_difference(std::uint64_t sequence) { asked_ = std::max(asked_, sequence); }
    Status find_dead();
    std::uint64_t seen_of(int rank) const;

    std::shared_ptr<Mesh> mesh_;
    const std::uint64_t id_;
    const std::vector<int> members_;
    int rank_;
    std::shared_ptr<Group> parent_;
    std::vector<int> ranks_by_world_;
    std::vector<Peer> peers_;
    Messages messages_;
    RankStatus own_status_;  // of this rank
    std::uint64_t fingerprint_ = 0;
    std::uint64_t asked_ = 0;  // the last call that ranks were found to differ in
    std::vector<GroupError> errors_;
    std::uint64_t stated_ = 0;  // the call that descriptors_ are of
    std::vector<std::optional<std::string>> descriptors_;
    std::uint64_t heard_ = 0;  // the same on the coordinator's way back
    std::vector<std::optional<std::string>> heard_descriptors_;
    std::uint64_t last_report_ = 0;
    bool has_barred_ = false;      // whether the last call that was given up was for barred ranks
    std::uint64_t expired_ = 0;    // the last call whose deadline was over
    std::uint64_t last_moves_ = 0;      // of all ranks, when it was
    std::int64_t next_expiry_ns_ = 0;   // when to ask again whether anything moves
    std::int64_t next_look_ns_ = 0;     // the same whether one who is missing is stuck
    std::vector<int> given_up_for_;     // who is barred or waited for in a call that was given up
    std::uint64_t last_poll_ = 0;  // for dead ranks
    std::int64_t next_poll_ns_ = 0;
    int last_awaited_ = -1;
    std::vector<int> ring_;
    std::uint64_t num_receives_ = 0;
};

}  // namespace ferrodist::net
