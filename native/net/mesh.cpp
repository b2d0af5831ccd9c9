// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/mesh.hpp"

#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <set>
#include <system_error>

#include "core/process.hpp"
#include "net/group.hpp"

namespace ferrodist::net {
namespace {

constexpr std::uint32_t wake_up = UINT32_MAX;
constexpr std::int64_t ms = 1'000'000;
constexpr std::int64_t longest_work_ns = 100 * ms;  // between two looks at the sockets
constexpr std::chrono::milliseconds nap{20};  // of the thread of the mesh while others read

// All meshes of this process, so that a forked child closes its copies of their sockets: while it has
// them, the others would not hear of this process's death.
struct Register {
    std::mutex mutex;
    std::set<Mesh*> meshes;
};

Register& all_meshes() {
    static auto* const one = new Register;  // outlives every mesh
    return *one;
}

std::set<int>& sockets_to_close() {
    static auto* const one = new std::set<int>;
    return *one;
}

void close_in_child() {
    for (const int socket : sockets_to_close()) {
        ::close(socket);
    }
    all_meshes().mutex.unlock();
}

// Whether all that this rank hears of the CPUs of its host comes from one rank. Where there are more, some
// may not have sent anything for long.
bool has_one_local_peer(const std::vector<LinkSpec>& specs) {
    return std::count_if(specs.begin(), specs.end(), [](const LinkSpec& spec) { return is_of_one_host(spec.socket); }) <= 1;
}

std::vector<core::Word*> pointers_to(std::vector<core::Word>& words) {
    std::vector<core::Word*> pointers;
    for (core::Word& word : words) {
        pointers.push_back(&word);
    }
    return pointers;
}

void watch_forks() {
    static const int is_watched = pthread_atfork([] { all_meshes().mutex.lock(); },
                                                 [] { all_meshes().mutex.unlock(); }, close_in_child);
    (void)is_watched;
}

}  // namespace

Mesh::Mesh(int rank, const std::vector<LinkSpec>& specs, const MeshOptions& options)
    : reports(specs.size()), rank_(rank), options_(options), last_time_ns_(core::now_ns()),
      last_heard_ns_(specs.size()), sent_at_last_beat_(specs.size()), held_ns_(specs.size()),
      told_held_ns_(specs.size()), cpus_(specs.size()),
      spins_(pointers_to(cpus_), rank, has_one_local_peer(specs)) {
    watch_forks();
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
        throw std::system_error(errno, std::system_category(), "epoll");
    }
    epoll_event wake{};
    wake.events = EPOLLIN;
    wake.data.u32 = wake_up;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &wake);
    const std::lock_guard guard(all_meshes().mutex);
    for (std::size_t peer = 0; peer < specs.size(); ++peer) {
        links_.push_back(std::make_unique<Link>(specs[peer].socket, specs[peer].session,
                                                static_cast<std::uint32_t>(rank),
                                                static_cast<std::uint32_t>(peer), options.piece_nbytes));
        watches_.push_back(specs[peer].watch);
        if (specs[peer].socket < 0) {
            continue;
        }
        epoll_event event{};
        event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
        event.data.u32 = static_cast<std::uint32_t>(peer);
        if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, specs[peer].socket, &event) != 0) {
            throw std::system_error(errno, std::system_category(), "epoll_ctl");
        }
        sockets_to_close().insert(specs[peer].socket);
    }
    for (const int own : {epoll_, wake_}) {
        sockets_to_close().insert(own);
    }
}

void Mesh::start() {
    if (size() > 1 && !background_.joinable()) {
        background_ = core::start_thread([this] { run_in_background(); });
    }
}

Mesh::~Mesh() {
    if (birth_.is_of_ancestor()) {
        if (background_.joinable()) {
            background_.detach();  // it is not in this process
        }
        for (auto& link : links_) {
            link.release();  // its socket was closed, and the number may be another file's by now
        }
        return;
    }
    {
        const Lock guard = lock();
        is_ending_ = true;
        idle_.notify_all();
        notify();
    }
    if (background_.joinable()) {
        background_.join();
    }
    const std::lock_guard guard(all_meshes().mutex);
    for (auto& link : links_) {
        sockets_to_close().erase(link->socket());
        link->close();
    }
    for (const int own : {epoll_, wake_}) {
        sockets_to_close().erase(own);
        ::close(own);
    }
    delete &changed_;
    delete &idle_;
}

// -- sending --------------------------------------------------------------------------------------

void Mesh::send(int peer, const Header& header, Bytes payload, bool is_urgent) {
    if (is_of_ancestor()) {
        return;  // the number of a socket may be another file's by now
    }
    Link& to = link(peer);
    to.send_copy(header, payload, is_urgent);
    to.flush();
}

bool Mesh::lacks_heartbeat(int peer) {
    std::int64_t& last_heard_ns = last_heard_ns_[static_cast<std::size_t>(peer)];
    if (peer == rank_ || awake_ns_ - last_heard_ns <= options_.heartbeat_timeout_ns) {
        return false;
    }
    if (const int watch = watches_[static_cast<std::size_t>(peer)]; watch >= 0 && core::is_traced(watch)) {
        last_heard_ns = awake_ns_;  // a debugger that lets it go gives it all its time again
        return false;
    }
    return true;
}

// Counts time in which this process could have heard the others: not while it was stopped itself.
void Mesh::pass_time(std::int64_t waited_ns) {
    const std::int64_t now = core::now_ns();
    awake_ns_ += std::min(now - last_time_ns_, waited_ns + longest_work_ns);
    last_time_ns_ = now;
}

// -- reading --------------------------------------------------------------------------------------

void Mesh::notify() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

// Waits for events without the lock, and handles them with it; false if a signal ended the wait.
bool Mesh::handle_events(int timeout_ms, Lock& lock) {
    std::array<epoll_event, 64> events;
    if (!unfinished_.empty()) {
        timeout_ms = 0;
    }
    lock.unlock();
    const int count = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
    const bool is_signal = count < 0 && errno == EINTR;
    lock.lock();
    pass_time(timeout_ms * ms);
    for (const int peer : std::exchange(unfinished_, {})) {
        serve(peer);
    }
    for (int i = 0; i < count; ++i) {
        const std::uint32_t peer = events[static_cast<std::size_t>(i)].data.u32;
        if (peer == wake_up) {
            std::uint64_t drained;
            [[maybe_unused]] const ssize_t got = ::read(wake_, &drained, sizeof drained);
            ++epoch_;
            continue;
        }
        const std::uint32_t flags = events[static_cast<std::size_t>(i)].events;
        if (flags & EPOLLOUT) {
            link(static_cast<int>(peer)).set_writable();
        }
        if (flags & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {  // there is no further edge for it
            link(static_cast<int>(peer)).note_end();
        }
        serve(static_cast<int>(peer));
    }
    advance_messages();
    return !is_signal;
}

void Mesh::poll(Lock& lock) {
    ++num_calls_;
    if (!is_polling_) {
        is_polling_ = true;
        handle_events(0, lock);
        is_polling_ = false;
    }
}

// Ends the sends that are through, and, when a rank has gone or has something to tell, what it was needed for.
void Mesh::advance_messages() {
    const bool is_check_due = std::exchange(is_check_due_, false);
    for (const auto& [id, group] : groups_) {
        if (group->messages().has_in_flight()) {
            group->messages().finish_sent();
            if (is_check_due) {
                group->messages().check();
            }
        }
    }
}

std::int64_t Mesh::next_deadline() const {
    std::int64_t first = 0;
    for (const auto& [id, group] : groups_) {
        const std::int64_t deadline = group->messages().next_deadline();
        first = deadline != 0 && (first == 0 || deadline < first) ? deadline : first;
    }
    return first;
}

// Reads from a rank and writes to it, as far as that goes.
void Mesh::serve(int peer) {
    Link& from = link(peer);
    const Link::State before = from.state();
    const std::uint64_t received = from.received_nbytes();
    if (!from.pump(*this)) {
        unfinished_.push_back(peer);
    }
    if (from.received_nbytes() != received) {
        last_heard_ns_[static_cast<std::size_t>(peer)] = awake_ns_;
        see_cpu(peer);
    }
    from.flush();
    ++epoch_;
    if (from.state() != before) {
        is_check_due_ = true;
        if (num_sleepers_ > 0) {
            changed_.notify_all();
        }
    }
}

// SO_INCOMING_CPU would cost no byte, but after own data its last packet may be an acknowledgement, made on the own CPU.
void Mesh::see_cpu(int peer) {
    if (link(peer).is_on_this_host()) {
        // Relaxed: a hint, which pairs with the loads in Spins.
        cpus_[static_cast<std::size_t>(peer)].store(link(peer).peer_cpu(), std::memory_order_relaxed);
    }
}

void Mesh::run_in_background() {
    Lock guard = lock();
    std::uint64_t calls_before = 0;
    while (!is_ending_) {
        beat();
        is_check_due_ = true;  // deadlines, ranks that are silent
        advance_messages();
        if (num_callers_ > 0 || num_calls_ != calls_before) {
            calls_before = num_calls_;
            idle_.wait_for(guard, nap);
            if (!is_polling_ && !is_ending_) {  // a caller may work, or wait for the GIL
                handle_events(0, guard);
            }
        } else {
            const std::int64_t deadline = next_deadline();
            const std::int64_t next = deadline == 0 ? next_beat_ns_ : std::min(deadline, next_beat_ns_);
            const std::int64_t rest = next - core::now_ns();
            handle_events(static_cast<int>(std::clamp<std::int64_t>(rest / ms + 1, 1, 1000)), guard);
        }
        if (is_polling_) {
            notify();  // what a caller waits for may have been handled here
        }
        changed_.notify_all();
    }
}

// Sends a heartbeat where nothing else was sent for a while, or where it has something to tell.
void Mesh::beat() {
    const std::int64_t now = core::now_ns();
    if (now < next_beat_ns_) {
        return;
    }
    next_beat_ns_ = now + options_.heartbeat_ns;
    const std::int64_t held_ns = core::longest_hold_ns(owner());
    for (int peer = 0; peer < size(); ++peer) {
        std::uint64_t& before = sent_at_last_beat_[static_cast<std::size_t>(peer)];
        std::int64_t& told = told_held_ns_[static_cast<std::size_t>(peer)];
        const bool has_news = link(peer).num_sent() == before || held_ns != told;
        if (peer != rank_ && has_news && link(peer).is_idle() && !is_finished_) {
            send(peer, {.kind = FrameKind::heartbeat, .sequence = static_cast<std::uint64_t>(held_ns)}, {}, true);
            told = held_ns;
        }
        before = link(peer).num_sent();
    }
}

// -- frames ---------------------------------------------------------------------------------------

std::byte* Mesh::place_for(int peer, const Header& header) {
    const auto found = groups_.find(header.group);
    return found == groups_.end() ? nullptr : found->second->place_for(peer, header);
}

void Mesh::on_frame(int peer, const Header& header, Payload payload, bool is_void) {
    if (header.kind == FrameKind::heartbeat) {
        held_ns_[static_cast<std::size_t>(peer)] = static_cast<std::int64_t>(header.sequence);
        return;
    }
    if (header.kind == FrameKind::join || header.kind == FrameKind::unjoin) {
        on_join(peer, header, payload.bytes());
        return;
    }
    if (const auto found = groups_.find(header.group); found != groups_.end()) {
        found->second->on_frame(peer, header, std::move(payload), is_void);
    }
}

// The members that a frame lists; none if they cannot be right.
std::vector<int> Mesh::read_members(int peer, Bytes payload) const {
    std::vector<int> members;
    for (std::size_t i = 0; i + sizeof(int) <= payload.size(); i += sizeof(int)) {
        int member;
        std::memcpy(&member, payload.data() + i, sizeof member);
        if (member < 0 || member >= size() || std::find(members.begin(), members.end(), member) != members.end()) {
            return {};
        }
        members.push_back(member);
    }
    return std::find(members.begin(), members.end(), peer) == members.end() ? std::vector<int>{} : members;
}

void Mesh::on_join(int peer, const Header& header, Bytes payload) {
    auto found = invitations_.find(header.group);
    if (header.kind == FrameKind::join) {
        std::vector<int> members = read_members(peer, payload);
        if (members.empty() || (found != invitations_.end() && found->second.members != members)) {
            return;
        }
        if (found == invitations_.end()) {
            std::vector<bool> nobody(members.size(), false);
            found = invitations_.emplace(header.group, Invitation{std::move(members), std::move(nobody)}).first;
        }
    } else if (const auto group = groups_.find(header.group); group != groups_.end()) {
        group->second->on_unjoin(peer);
    }
    if (found == invitations_.end()) {
        return;
    }
    auto& [members, has_joined] = found->second;
    const auto place = std::find(members.begin(), members.end(), peer);
    if (place != members.end()) {
        has_joined[static_cast<std::size_t>(place - members.begin())] = header.kind == FrameKind::join;
    }
    const auto joined = std::count(has_joined.begin(), has_joined.end(), true);
    const bool is_settled = joined == 0 || joined == static_cast<std::ptrdiff_t>(members.size());
    if (is_settled && std::find(members.begin(), members.end(), rank_) == members.end()) {
        invitations_.erase(found);  // no affair of this process
    }
}

// -- without the lock -----------------------------------------------------------------------------

void Mesh::report(std::string text) {
    const Lock guard = lock();
    reports[static_cast<std::size_t>(rank_)] = std::move(text);
}

std::string Mesh::report_of(int peer) {
    const Lock guard = lock();
    return reports[static_cast<std::size_t>(peer)];
}

std::uint64_t Mesh::total(std::uint64_t (Link::*count)() const) {
    const Lock guard = lock();
    return std::accumulate(links_.begin(), links_.end(), std::uint64_t{0},
                           [&](std::uint64_t sum, const auto& link) { return sum + (*link.*count)(); });
}

void Mesh::start_trace() {
    const Lock guard = lock();
    trace_.emplace();
}

std::vector<Trace> Mesh::stop_trace() {
    const Lock guard = lock();
    auto found = std::exchange(trace_, std::nullopt);
    return found ? std::move(*found) : std::vector<Trace>{};
}

std::vector<std::vector<int>> Mesh::invitations_of(int peer) {
    const Lock guard = lock();
    std::vector<std::vector<int>> found;
    for (const auto& [id, invitation] : invitations_) {
        for (std::size_t i = 0; i < invitation.members.size(); ++i) {
            if (invitation.members[i] == peer && invitation.has_joined[i]) {
                found.push_back(invitation.members);
            }
        }
    }
    return found;
}

void Mesh::finish(std::int64_t latest_ns) {
    if (birth_.is_of_ancestor()) {
        return;
    }
    constexpr std::int64_t wait_ns = 1'000 * ms;
    Lock guard = lock();
    if (std::exchange(is_finished_, true)) {
        return;
    }
    std::uint64_t rest_before = 0;
    std::int64_t end = 0;
    // Waits as long as bytes are on their way, and a second for the next ones.
    const auto is_worth_waiting = [&] {
        std::uint64_t rest = 0;
        for (const auto& one : links_) {
            rest += one->sent_nbytes() * 2 - one->num_undelivered();  // both of them only grow, or shrink
        }
        if (rest != rest_before || end == 0) {
            rest_before = rest;
            end = core::now_ns() + wait_ns;
        }
        return core::now_ns() < end && (latest_ns == 0 || core::now_ns() < latest_ns);
    };
    const auto all = [&](auto is_done) {
        return std::all_of(links_.begin(), links_.end(), [&](const auto& one) { return is_done(*one); });
    };
    while (!all([](const Link& one) { return one.is_idle(); }) && is_worth_waiting()) {
        handle_events(10, guard);
    }
    for (auto& one : links_) {
        one->finish();
    }
    // Only what the other kernel has is safe from a reset that our end may cause.
    while (!all([](const Link& one) { return one.is_delivered(); }) && is_worth_waiting()) {
        handle_events(1, guard);
    }
}

}  // namespace ferrodist::net
