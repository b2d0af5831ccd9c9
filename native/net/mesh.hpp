// SPDX-License-Identifier: MIT OR Apache-2.0
// Mesh: a process's connections to all other ranks, and who reads them.
//
// Waiting threads read: a caller in a wait polls all sockets and handles what comes, for all groups; if
// another caller does so already it sleeps until that one has handled something. So a message that is
// awaited costs no change of threads. While nobody calls, a thread of the mesh reads: it answers
// questions, keeps group errors and sends heartbeats, without the GIL and whatever the program does.
//
// One lock guards everything. It is never held while waiting, and never while the GIL is asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/process.hpp"
#include "core/wait.hpp"
#include "net/link.hpp"

namespace ferrodist::net {

class Group;
using Lock = std::unique_lock<std::mutex>;
using core::Status;
using core::StatusCode;
using core::WaitOptions;

struct LinkSpec {
    int socket;  // -1 for this rank itself
    std::vector<std::byte> session;
    int watch = -1;  // a pidfd, of a process on this host; the mesh does not close it
};

struct MeshOptions {
    std::int64_t heartbeat_ns, heartbeat_timeout_ns;
    std::uint64_t piece_nbytes;  // the longest piece of a collective
    // How long a rank may take to say whether it has entered a call, before the others are asked to refuse it. Its own
    // thread answers: it takes so long only if its process is stopped, or its host is out of reach.
    std::int64_t answer_ns = 500'000'000;
    bool is_of_thread = false;  // its rank is a thread: others of the process are other ranks, and waits never spin
};

// Ranks on their way to be a group, as far as this process has heard.
struct Invitation {
    std::vector<int> members;  // world ranks
    std::vector<bool> has_joined;
};

// A piece of a collective, as sent or received.
struct Trace {
    bool is_sent;
    int peer;
    std::uint64_t sequence, nbytes;
};

class Mesh final : public FrameHandler, public std::enable_shared_from_this<Mesh>, core::NonCopyable {
public:
    Mesh(int rank, const std::vector<LinkSpec>& specs, const MeshOptions& options);
    ~Mesh() override;

    // Begins to read, when there is a group to read for.
    void start();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(links_.size()); }
    const MeshOptions& options() const { return options_; }
    // How far ahead of their receiver the pieces of one group may be.
    std::uint64_t window_nbytes() const { return std::max<std::uint64_t>(8 << 20, 4 * options_.piece_nbytes); }
    core::Spins* spins() { return options_.is_of_thread ? core::no_spins : &spins_; }
    // Whose the threads are that wait in its calls.
    const void* owner() const { return options_.is_of_thread ? this : nullptr; }

    // Whether this process is a forked child of the one whose mesh this is.
    bool is_of_ancestor() const { return birth_.is_of_ancestor(); }

    Lock lock() { return Lock(mutex_); }

    // -- with the lock held ---------------------------------------------------------------------

    Link& link(int peer) { return *links_[static_cast<std::size_t>(peer)]; }
    // Sends a frame with a copy of its payload, at once if the kernel takes it.
    void send(int peer, const Header& header, Bytes payload = {}, bool is_urgent = false);
    bool is_up(int peer) const { return peer == rank_ || links_[static_cast<std::size_t>(peer)]->is_up(); }
    // Whether nothing at all was heard of a rank for too long; not if a debugger on this host holds it.
    bool lacks_heartbeat(int peer);
    // How long a thread of a rank has been held in one call, as of its last heartbeat.
    std::int64_t held_ns(int peer) const { return held_ns_[static_cast<std::size_t>(peer)]; }
    // Changes whenever something has happened that a wait may depend on.
    std::uint64_t epoch() const { return epoch_; }
    void add(std::uint64_t id, Group* group) { groups_[id] = group; }
    void remove(std::uint64_t id, const Group* group) {
        if (const auto found = groups_.find(id); found != groups_.end() && found->second == group) {
            groups_.erase(found);
        }
    }
    // Lets all waits look again.
    void changed() {
        ++epoch_;
        changed_.notify_all();
        if (is_polling_) {
            notify();
        }
    }
    // The same for those that sleep, while others read.
    void note_change() {
        ++epoch_;
        if (num_sleepers_ > 0) {
            changed_.notify_all();
        }
    }
    // Requests may have become hopeless: they are looked at when all that has come is handled.
    void check_requests() { is_check_due_ = true; }
    // Lets the thread of the mesh look at the deadlines of requests.
    void wake_background() { notify(); }
    // Handles what has come, without waiting.
    void poll(Lock& lock);
    std::map<std::uint64_t, Invitation>& invitations() { return invitations_; }
    std::uint64_t new_number() { return ++last_number_; }
    void note(bool is_sent, int peer, std::uint64_t sequence, std::uint64_t nbytes) {
        if (trace_) {
            trace_->push_back({is_sent, peer, sequence, nbytes});
        }
    }
    // What processes were last heard to wait in, by world rank.
    std::vector<std::string> reports;

    // -- without it -----------------------------------------------------------------------------

    void report(std::string text);
    std::string report_of(int peer);
    std::uint64_t sent_nbytes() { return total(&Link::sent_nbytes); }
    std::uint64_t received_nbytes() { return total(&Link::received_nbytes); }
    void start_trace();
    std::vector<Trace> stop_trace();
    std::vector<std::vector<int>> invitations_of(int peer);
    // Ends all connections in order: what was sent arrives. Gives up when nothing has moved for a second, and at
    // a moment (0: none).
    void finish(std::int64_t latest_ns = 0);

    // -- frames ---------------------------------------------------------------------------------

    std::byte* place_for(int peer, const Header& header) override;
    void on_frame(int peer, const Header& header, Payload payload, bool is_void) override;

private:
    friend class Waiter;

    std::uint64_t total(std::uint64_t (Link::*count)() const);
    bool handle_events(int timeout_ms, Lock& lock);
    void advance_messages();
    std::int64_t next_deadline() const;
    void pass_time(std::int64_t waited_ns);
    void serve(int peer);
    void see_cpu(int peer);
    void run_in_background();
    void beat();
    std::vector<int> read_members(int peer, Bytes payload) const;
    void on_join(int peer, const Header& header, Bytes payload);
    void notify();

    const int rank_;
    const MeshOptions options_;
    const core::Birth birth_;
    std::mutex mutex_;
    // A forked child never destroys these: it would wait for waits of threads that it does not have.
    std::condition_variable &changed_ = *new std::condition_variable, &idle_ = *new std::condition_variable;
    std::vector<std::unique_ptr<Link>> links_;
    std::vector<int> unfinished_;  // links of which not all was read at one go
    std::unordered_map<std::uint64_t, Group*> groups_;
    std::map<std::uint64_t, Invitation> invitations_;
    std::optional<std::vector<Trace>> trace_;
    std::uint64_t epoch_ = 0, last_number_ = 0;
    int epoll_ = -1, wake_ = -1;
    bool is_check_due_ = false;  // whether requests may have become hopeless
    bool is_polling_ = false, is_ending_ = false, is_finished_ = false;
    int num_callers_ = 0, num_sleepers_ = 0;
    std::uint64_t num_calls_ = 0;
    std::int64_t last_time_ns_, awake_ns_ = 0;
    std::vector<std::int64_t> last_heard_ns_;  // by awake_ns_
    std::vector<int> watches_;                 // pidfds; -1: none
    std::vector<std::uint64_t> sent_at_last_beat_;
    std::vector<std::int64_t> held_ns_, told_held_ns_;  // what others have told, and were told
    std::int64_t next_beat_ns_ = 0;
    std::vector<core::Word> cpus_;  // by rank, of those on this host; 0 for the others
    core::Spins spins_;
    std::thread background_;
};

}  // namespace ferrodist::net
