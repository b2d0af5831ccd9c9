// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages: the matching engine for the point-to-point calls of one rank in one group.
//
// A call is a Request. isend and irecv post it and never wait; it completes when its message has been
// matched and moved, and the thread that makes progress completes it. There is one queue of posted receives and
// one of unexpected messages per group (MatchQueue), above whatever moves bytes. A message that is an object
// and one that is an array do not take each other's place: a receive of the other kind fails, and the
// message stays. What ranks tell each other, in order between any two of them:
//
//     eager      a whole message, up to the eager limit. Its send is done at once. The receiver keeps it
//                until it is wanted; the sender counts what is not, and beyond a limit sends an RTS.
//     RTS        a large message is there: its number, size and header
//     CTS        the receiver has matched it: send the data
//     data       moved as the transport likes, straight into the receiver's memory
//     taken      the receiver does not want it: the send is done. Or it had no memory for it: the send fails
//     withdraw   the sender takes its RTS back; a receive that has matched it meanwhile waits for the next
//     abandoned  no more data comes of a message whose data was on its way: as withdraw
//
// What a rank sends to itself goes no further than here: it is copied from send to receive, or kept.
//
// Here is what all transports share; a transport is a subclass. One lock, of the transport, guards all of
// it; nobody waits with it held. Progress is made by everybody who waits, for all requests of the process,
// and while nobody waits by one thread of the transport, asleep until something comes.
//
// A request fails when its deadline has passed, its peer is gone or silent, or its group has an error:
// check() finds that, and every wait calls it now and then. A receive from any rank fails when one has died,
// or when all others have closed, after the messages that are there.
// All of that concerns this one call only. A wait that runs out, on the other hand, leaves its request in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/match_queue.hpp"
#include "core/wait.hpp"
#include "core/request.hpp"

namespace ferrodist::core {

constexpr std::size_t eager_limit = 64 * 1024;
constexpr std::uint64_t default_unexpected_limit = 16 << 20;
// What a message of no bytes costs its receiver: without it small ones would not be bounded.
constexpr std::uint64_t message_overhead = 128;

class Messages : core::NonCopyable {
public:
    using Lock = std::unique_lock<std::mutex>;

    Messages(int rank, int world) : rank_(rank), in_flight_(static_cast<std::size_t>(world)) {}
    virtual ~Messages() = default;

    // -- calls: any thread, without the lock ----------------------------------------------------------

    // Starts the thread that requests need which are unattended, where it is not running; throws std::system_error.
    virtual void start_progress() {}
    // Posts a send: source, nbytes, peer and tag are set. May throw std::bad_alloc: then it is not posted.
    void isend(Request& send, Bytes header);
    // Posts a receive: peer, tag, and target, nbytes and the header it expects, or its place, are set. Or a probe.
    void irecv(Request& receive);
    // Tells what a receive would get, without posting it: sets found, found_source and found_tag.
    bool peek(Request& probe);
    // Withdraws a request, which then has failed with this status; false if it is matched, or complete.
    bool cancel(Request& request, const Status& why);
    // Ends a request whatever has become of it: nothing of it or its memory is touched any more.
    void abandon(Request& request, const Status& why);
    // Waits until a request is complete. Fails if the wait is late or interrupted: then the request is
    // still in flight. `holds_caller` shows a send that waits to those who look for cycles of sends.
    virtual Status wait(Request& request, const WaitOptions& options, bool holds_caller) = 0;
    // Makes progress without waiting, and tells whether the request is complete.
    virtual bool test(Request& request) = 0;
    // Makes progress without waiting, where peek does not do so itself.
    virtual void poll() {}
    // Has Completions told of the end of a request; false if it is complete, and nobody is told.
    bool hear_of(Request& request, std::uint64_t token);
    // The tags of messages of a rank that have come and nobody received.
    std::vector<std::uint32_t> unexpected_tags(int peer);
    // How many bytes of eager messages a rank may leave unreceived.
    void set_unexpected_limit(std::uint64_t nbytes);

    std::size_t num_in_flight();

protected:
    // -- what a transport does: with the lock held, never waiting --------------------------------------

    virtual Lock lock() = 0;
    // Whether this is a forked child's copy of its parent's: nothing may be touched.
    virtual bool is_of_ancestor() const = 0;
    // How many bytes of this rank's eager messages a rank has received so far, as far as is known.
    virtual std::uint64_t eager_received(int peer) = 0;
    virtual void send_eager(Request& send, Bytes header) = 0;
    virtual void send_rts(Request& send, Bytes header) = 0;
    virtual void send_cts(int peer, std::uint64_t number) = 0;
    // With another code than done the send of this number fails; 0 stands for all that wait for this rank.
    virtual void send_taken(int peer, std::uint64_t number, StatusCode code) = 0;
    virtual void send_withdraw(int peer, std::uint64_t number) = 0;
    // Begins to send the data of a message whose receiver has matched it.
    virtual void begin_data(Request& send) = 0;
    // Ends the transfer of a matched request: its memory is not touched any more.
    virtual void end_data(Request& request) = 0;
    // A request has moved its bytes: a statistic.
    virtual void count_moved(const Request& request) = 0;
    // So many bytes of eager messages of a rank were received, or dropped.
    virtual void count_received(int peer, std::uint64_t nbytes) = 0;
    // A receive has been posted (1), or is over (-1).
    virtual void count_receives(int change) = 0;
    // Reads what has come of a rank.
    virtual void read(int peer) = 0;
    // A request that is unattended was posted: somebody has to make progress.
    virtual void note_posted(const Request& request) = 0;
    // Requests have completed: waiting threads of this process look again.
    virtual void note_completed() = 0;

    // What the group and its ranks are up to.
    virtual Status group_error() const = 0;
    virtual bool is_gone(int peer) const = 0;
    virtual bool is_closing(int peer) const = 0;
    // Whether a rank that is gone had said so before, and did not die.
    virtual bool has_closed(int peer) const = 0;
    // Whether a rank that is closing has no receives left.
    virtual bool receives_no_more(int peer) const = 0;
    virtual Status loss(int peer) const = 0;
    virtual bool lacks_heartbeat(int peer) = 0;
    // How long a thread of a rank has been held in one call.
    virtual std::int64_t held_ns(int peer) const = 0;
    // A number that changes as long as the data of a request moves.
    virtual std::uint64_t moves_of(const Request& request) const = 0;

    // -- what a transport hears: with the lock held ----------------------------------------------------

    // Both throw std::bad_alloc if nobody wants the message yet and there is no memory to keep it: then nothing has
    // become of it. `memory`, if it is given, holds header and body, and is kept.
    void on_eager(int peer, std::uint32_t tag, Bytes header, Bytes body, OwnBytes memory);
    void on_rts(int peer, std::uint32_t tag, std::uint64_t number, std::uint64_t nbytes, Bytes header);
    // The large send of this number to a rank that is in flight; null if there is none.
    Request* find_send(int peer, std::uint64_t number) const;
    // Null if no such send waits for it.
    Request* on_cts(int peer, std::uint64_t number);
    void on_taken(int peer, std::uint64_t number, StatusCode code);
    // An eager message (number 0) or an RTS was lost for want of memory: whose receive it was for is told, or who
    // receives from that rank next; and so is its sender.
    void on_lost(int peer, std::uint32_t tag, std::uint64_t number);
    // Tells a rank that there was no memory for what it sent.
    void tell_no_memory(int peer, std::uint64_t number);
    // The rank has lost an eager message of ours: if no send waits, the next one fails.
    void on_refused(int peer, bool is_lost);
    // The RTS was withdrawn, or the rest of the data is not coming.
    void on_withdraw(int peer, std::uint64_t number);
    // The receive that the data of a message goes to; null if there is none.
    Request* find_arrival(int peer, std::uint64_t number) const;
    // The posted receive that an eager message of this header and size goes to, taken out; null if there is
    // none. One that does not fit has failed, and `is_dropped` says that the message is to be.
    Request* match_eager(int peer, std::uint32_t tag, Bytes header, std::uint64_t nbytes, bool& is_dropped);

    // Ends a request: unlinks it and hands it back to its owner.
    void complete(Request& request, const Status& status = {});
    // Puts a matched receive back: its message is not coming.
    void match_again(Request& receive);
    // Whether a wait goes on for a rank though its deadline is over.
    bool may_still_come(const Request& request, const WaitOptions& options) const {
        return options.is_patient() && is_anybody_free(request, options.patience.stuck_ns);
    }
    // Fails what cannot succeed any more.
    void check();
    // All requests with a rank, or its receives, whatever they wait for; and receives from any.
    void fail_all(int peer, const Status& status);
    void fail_receives(int peer, const Status& status);
    // The first deadline of a request that fails by itself; 0: none.
    std::int64_t next_deadline() const { return deadlines_.empty() ? 0 : deadlines_.begin()->first; }

    using Flight = List<Request, &Request::flight_link>;
    const Flight& in_flight(int peer) const { return in_flight_[static_cast<std::size_t>(peer)]; }
    int size() const { return static_cast<int>(in_flight_.size()); }
    std::uint64_t unexpected_limit() const { return unexpected_limit_; }
    bool has_in_flight() const { return num_in_flight_ > 0; }
    // Whether messages of any rank are waited for.
    bool takes_from_any() const { return !from_any_.empty(); }
    // A receive has a message of this rank, whose bytes are on their way.
    void set_matched(Request& receive, int peer);
    bool has_unattended() const { return num_unattended_ > 0; }

private:
    void send_to_self(Request& send, Bytes header);
    void receive_from_self(Request& receive, std::uint64_t number);
    void keep(Unexpected message);
    void answer(Request& probe, const Unexpected& message);
    bool match(Request& receive);
    Request* take_receive(int peer, std::uint32_t tag, Bytes header);
    void fail_at_once(Request& send, const Status& status);
    bool try_cancel(Request& request, const Status& why);
    void end(Request& request, const Status& why);
    template <class Trouble>
    void end_those(int peer, const Trouble& trouble);
    void track(Request& request);
    void move_to(int flight, Request& request);
    Flight& flight_at(int flight) {
        return flight < 0 ? from_any_ : in_flight_[static_cast<std::size_t>(flight)];
    }
    void give(Request& receive, Unexpected& message);
    void begin_receive(Request& receive, int peer, std::uint64_t number);
    StatusCode try_fit(Request& receive, int peer, Bytes header, std::uint64_t nbytes);
    void refuse_rts(int peer, std::uint64_t number, StatusCode code);
    void forget(int peer, std::uint64_t nbytes);
    std::size_t* find_lost(const Request& receive);
    void check_peer(int peer);
    Status loss_of_any();
    void fail_from_any(const Status& status);
    bool is_anybody_free(const Request& request, std::int64_t stuck_ns) const;
    Status trouble(const Request& request, bool is_gone, bool is_closing) const;
    void expire();

    const int rank_;
    MatchQueue queue_;
    std::vector<Flight> in_flight_;  // by peer
    Flight from_any_;                // receives from any rank that nothing has come for
    std::uint64_t num_kept_of_self_ = 0;  // bytes of messages to itself that were copied
    std::size_t num_in_flight_ = 0, num_unattended_ = 0;
    std::unordered_map<std::uint64_t, Request*> sends_;  // large ones, by number
    struct ArrivalHash {
        std::size_t operator()(const std::pair<int, std::uint64_t>& key) const {
            return static_cast<std::size_t>(key.second * 31 + static_cast<std::uint64_t>(key.first));
        }
    };
    std::unordered_map<std::pair<int, std::uint64_t>, Request*, ArrivalHash> arrivals_;  // matched receives
    std::set<std::pair<std::int64_t, Request*>> deadlines_;
    std::vector<std::uint64_t> eager_sent_ = std::vector<std::uint64_t>(in_flight_.size());  // bytes, by peer
    std::vector<std::size_t> num_lost_ = std::vector<std::size_t>(in_flight_.size());  // no receive has been told of
    std::size_t num_lost_in_all_ = 0;
    std::vector<bool> is_refused_ = std::vector<bool>(in_flight_.size());  // the next send to it is told
    std::uint64_t last_number_ = 0, unexpected_limit_ = default_unexpected_limit;
};

}  // namespace ferrodist::core
