// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/messages.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/memory.hpp"
#include "core/process.hpp"

namespace ferrodist::core {
namespace {

// Memory with the body of a message and, behind it, its header.
OwnBytes copy_of(Bytes header, Bytes body) {
    require_memory(body.size() + header.size());
    OwnBytes memory(new std::byte[body.size() + header.size() + 1], [](std::byte* bytes) { delete[] bytes; });
    copy_bytes(memory.get(), body.data(), body.size());
    copy_bytes(memory.get() + body.size(), header.data(), header.size());
    return memory;
}

}  // namespace

// -- calls -----------------------------------------------------------------------------------------

void Messages::isend(Request& send, Bytes header) {
    const Lock guard = lock();
    send.is_send = true;
    if (send.peer == rank_) {
        return send_to_self(send, header);
    }
    if (is_refused_[static_cast<std::size_t>(send.peer)] && send.tag < first_internal_tag) {
        is_refused_[static_cast<std::size_t>(send.peer)] = false;
        return fail_at_once(send, {StatusCode::no_memory, send.peer});
    }
    std::uint64_t& sent = eager_sent_[static_cast<std::size_t>(send.peer)];
    const std::uint64_t cost = send.nbytes + message_overhead;
    const auto has_room = [&] {
        return sent + cost <= unexpected_limit_ || sent + cost - eager_received(send.peer) <= unexpected_limit_;
    };
    if (send.nbytes <= eager_limit && has_room()) {
        send_eager(send, header);
        sent += cost;
        send.finish({});
        return;
    }
    send.number = ++last_number_;
    const auto place = sends_.emplace(send.number, &send).first;
    try {
        send_rts(send, header);
    } catch (...) {
        sends_.erase(place);
        throw;
    }
    track(send);
}

void Messages::irecv(Request& receive) {
    const Lock guard = lock();
    receive.number = 0;
    receive.room = receive.nbytes;
    track(receive);
    count_receives(receive.is_probe ? 0 : 1);
    if (match(receive)) {
        return;
    }
    std::size_t* const lost = num_lost_in_all_ == 0 ? nullptr : find_lost(receive);
    if (lost != nullptr && !receive.is_probe) {
        --*lost;
        --num_lost_in_all_;
        complete(receive, {StatusCode::no_memory, receive.peer});
    } else {
        queue_.post(receive);
    }
}

bool Messages::peek(Request& probe) {
    const Lock guard = lock();
    for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank_ && (probe.takes_any_source || probe.peer == peer)) {
            read(peer);
        }
    }
    const Unexpected* const message = queue_.find(probe);
    if (message != nullptr) {
        answer(probe, *message);
    }
    return message != nullptr;
}

// Gives a receive the message it is to get; false if that is not there. A receive that is complete may be gone.
bool Messages::match(Request& receive) {
    Unexpected* const message = queue_.find(receive);
    if (message == nullptr) {
        return false;
    }
    receive.found_source = message->source;
    receive.found_tag = message->tag;
    if (receive.is_probe) {
        answer(receive, *message);
        complete(receive);
    } else if (receive.takes_object != is_object(message->header)) {
        complete(receive, {StatusCode::other_kind, message->source});
    } else {
        const auto taken = queue_.take(*message);
        give(receive, *taken);
    }
    return true;
}

void Messages::answer(Request& probe, const Unexpected& message) {
    probe.found_source = message.source;
    probe.found_tag = message.tag;
    probe.found.assign(message.header.begin(), message.header.end());
}

// How many messages were lost that a receive may have been for; null if none was.
std::size_t* Messages::find_lost(const Request& receive) {
    const bool is_internal = !receive.takes_any_tag && receive.tag >= first_internal_tag;
    for (std::size_t peer = 0; peer < num_lost_.size() && !is_internal; ++peer) {
        if (num_lost_[peer] > 0 && (receive.takes_any_source || receive.peer == static_cast<int>(peer))) {
            return &num_lost_[peer];
        }
    }
    return nullptr;
}

// Fails a send that was not posted.
void Messages::fail_at_once(Request& send, const Status& status) {
    const std::uint64_t token = send.token;
    send.finish(status);
    if (token != 0) {
        Completions::of_process().add(token);
    }
}

void Messages::track(Request& request) {
    request.set_pending();
    request.flight = request.takes_any_source ? -1 : request.peer;
    flight_at(request.flight).push_back(request);
    ++num_in_flight_;
    if (request.deadline_ns != 0) {
        deadlines_.emplace(request.deadline_ns, &request);
    }
    if (request.is_unattended) {
        ++num_unattended_;
        note_posted(request);
    }
}

void Messages::move_to(int flight, Request& request) {
    if (request.flight != flight) {
        flight_at(request.flight).erase(request);
        request.flight = flight;
        flight_at(flight).push_back(request);
    }
}

void Messages::set_matched(Request& receive, int peer) {
    move_to(peer, receive);
    receive.set_matched();
}

void Messages::complete(Request& request, const Status& status) {
    flight_at(request.flight).erase(request);
    --num_in_flight_;
    num_unattended_ -= request.is_unattended ? 1 : 0;
    if (request.deadline_ns != 0) {
        deadlines_.erase({request.deadline_ns, &request});
    }
    if (request.is_send) {
        sends_.erase(request.number);
    } else {
        if (request.state() == Request::State::matched) {
            arrivals_.erase({request.found_source, request.number});
        }
        count_receives(request.is_probe ? 0 : -1);
    }
    if (!status.failed() && !request.is_probe) {
        count_moved(request);
    }
    request.transfer.reset();
    const bool is_heard = request.token != 0 && (status.failed() || request.is_heard_if_done);
    const std::uint64_t token = request.token;
    request.finish(status);  // it may be gone from here on
    if (is_heard) {
        Completions::of_process().add(token);
    }
    note_completed();
}

bool Messages::cancel(Request& request, const Status& why) {
    if (is_of_ancestor()) {
        return false;
    }
    const Lock guard = lock();
    return try_cancel(request, why);
}

bool Messages::try_cancel(Request& request, const Status& why) {
    if (request.state() != Request::State::pending) {
        return false;
    }
    if (!request.is_send) {
        queue_.withdraw(request);
    } else if (request.peer == rank_) {
        queue_.take_rts(rank_, request.number);
    } else {
        send_withdraw(request.peer, request.number);
    }
    complete(request, why);
    return true;
}

void Messages::abandon(Request& request, const Status& why) {
    if (request.is_complete() || is_of_ancestor()) {
        return;
    }
    const Lock guard = lock();
    if (!request.is_complete()) {
        end(request, why);
    }
}

// Ends a request in flight, whatever has become of it.
void Messages::end(Request& request, const Status& why) {
    if (try_cancel(request, why)) {
        return;
    }
    end_data(request);
    complete(request, why);
}

// Ends the requests with a rank that `trouble` gives a status for.
template <class Trouble>
void Messages::end_those(int peer, const Trouble& trouble) {
    for (Request *one = in_flight(peer).front(), *next = nullptr; one != nullptr; one = next) {
        next = Flight::after(*one);
        if (const Status status = trouble(*one); status.failed()) {
            end(*one, status);
        }
    }
}

bool Messages::hear_of(Request& request, std::uint64_t token) {
    const Lock guard = lock();
    if (request.is_complete()) {
        return false;
    }
    request.token = token;
    request.is_heard_if_done = true;
    return true;
}

std::vector<std::uint32_t> Messages::unexpected_tags(int peer) {
    const Lock guard = lock();
    read(peer);
    return queue_.unexpected_tags(peer);
}

void Messages::set_unexpected_limit(std::uint64_t nbytes) {
    const Lock guard = lock();
    unexpected_limit_ = nbytes;
}

std::size_t Messages::num_in_flight() {
    const Lock guard = lock();
    return num_in_flight_;
}

// -- a message and its receive -----------------------------------------------------------------------

namespace {

constexpr std::size_t rows_at = 2, rest_at = 10;  // in a header: the number of rows, and what follows it

std::uint64_t rows_of(Bytes header) {
    std::uint64_t rows = 0;
    std::memcpy(&rows, header.data() + rows_at, sizeof rows);
    return rows;
}

// Whether a message has the dtype and the rows that a receive expects, and not more of them than there is room for.
bool fits_with_fewer_rows(Request& receive, Bytes header, std::uint64_t nbytes) {
    const Bytes expected = receive.header;
    const std::uint64_t rows = rows_of(header), most = rows_of(expected);
    const std::uint64_t row_nbytes = most == 0 ? 0 : receive.room / most;
    const auto is_equal = [&](std::size_t begin, std::size_t end) {
        return std::ranges::equal(header.subspan(begin, end - begin), expected.subspan(begin, end - begin));
    };
    if (rows > most || nbytes != rows * row_nbytes || !is_equal(0, rows_at) || !is_equal(rest_at, expected.size())) {
        return false;
    }
    receive.nbytes = nbytes;
    return true;
}

// Makes room for a message, or compares it with what a receive expects.
bool fits(Request& receive, Bytes header, std::uint64_t nbytes) {
    if (receive.place != nullptr) {
        receive.target = receive.place->make(header, nbytes);
        receive.nbytes = nbytes;
        return receive.target != nullptr;
    }
    const Bytes expected = receive.header;
    if (header.size() < expected.size()) {
        return false;
    }
    if (receive.takes_shorter && expected.size() >= rest_at) {
        return fits_with_fewer_rows(receive, header, nbytes);
    }
    return nbytes == receive.room && std::ranges::equal(header.first(expected.size()), expected);
}

}  // namespace

// Done if a receive takes a message; else it has failed with this code, and tells what the message was.
StatusCode Messages::try_fit(Request& receive, int peer, Bytes header, std::uint64_t nbytes) {
    StatusCode code = StatusCode::unexpected;
    try {
        const bool is_taken = fits(receive, header, nbytes);
        if (!is_taken || receive.keeps_header) {
            receive.found.assign(header.begin(), header.end());
        }
        if (is_taken) {
            return StatusCode::done;
        }
    } catch (const std::bad_alloc&) {
        code = StatusCode::no_memory;
    }
    complete(receive, {code, peer});
    return code;
}

// A large message did not fit: its sender need not keep it.
void Messages::refuse_rts(int peer, std::uint64_t number, StatusCode code) {
    if (peer == rank_) {
        on_taken(peer, number, code == StatusCode::no_memory ? code : StatusCode::done);
    } else if (code == StatusCode::no_memory) {
        tell_no_memory(peer, number);
    } else {
        send_taken(peer, number, StatusCode::done);
    }
}

// Takes out the receive that a message goes to. Those that are for another kind of message fail, and leave it.
Request* Messages::take_receive(int peer, std::uint32_t tag, Bytes header) {
    while (Request* const receive = queue_.take_posted(peer, tag)) {
        receive->found_source = peer;
        receive->found_tag = tag;
        if (receive->takes_object == is_object(header)) {
            return receive;
        }
        complete(*receive, {StatusCode::other_kind, peer});
    }
    return nullptr;
}

Request* Messages::match_eager(int peer, std::uint32_t tag, Bytes header, std::uint64_t nbytes, bool& is_dropped) {
    Request* const receive = take_receive(peer, tag, header);
    if (receive == nullptr) {
        return nullptr;
    }
    is_dropped = try_fit(*receive, peer, header, nbytes) != StatusCode::done;
    return is_dropped ? nullptr : receive;
}

void Messages::on_eager(int peer, std::uint32_t tag, Bytes header, Bytes body, OwnBytes memory) {
    bool is_dropped = false;
    if (Request* const receive = match_eager(peer, tag, header, body.size(), is_dropped)) {
        copy_bytes(receive->target, body.data(), body.size());
        complete(*receive);
    } else if (!is_dropped) {
        if (memory == nullptr) {
            memory = copy_of(header, body);
            body = {memory.get(), body.size()};
            header = {memory.get() + body.size(), header.size()};
        }
        return keep({peer, tag, false, 0, body.size(), std::move(memory), header, body});
    }
    forget(peer, body.size() + message_overhead);
}

void Messages::keep(Unexpected message) {
    require_memory(sizeof message);
    const Unexpected& kept = queue_.keep(std::make_unique<Unexpected>(std::move(message)));
    while (Request* const probe = queue_.take_probe(kept.source, kept.tag)) {
        answer(*probe, kept);
        complete(*probe);
    }
}

void Messages::on_rts(int peer, std::uint32_t tag, std::uint64_t number, std::uint64_t nbytes, Bytes header) {
    if (Request* const receive = take_receive(peer, tag, header)) {
        const StatusCode code = try_fit(*receive, peer, header, nbytes);
        return code == StatusCode::done ? begin_receive(*receive, peer, number) : refuse_rts(peer, number, code);
    }
    OwnBytes memory = copy_of(header, {});
    const Bytes kept(memory.get(), header.size());
    keep({peer, tag, true, number, nbytes, std::move(memory), kept, {}});
}

void Messages::on_lost(int peer, std::uint32_t tag, std::uint64_t number) {
    if (Request* const receive = queue_.take_posted(peer, tag)) {
        complete(*receive, {StatusCode::no_memory, peer});
    } else {
        ++num_lost_[static_cast<std::size_t>(peer)];
        ++num_lost_in_all_;
    }
    tell_no_memory(peer, number);
}

void Messages::tell_no_memory(int peer, std::uint64_t number) {
    try {
        send_taken(peer, number, StatusCode::no_memory);
    } catch (const std::bad_alloc&) {
        // Its send fails at its deadline.
    }
}

// Gives a message that is there to a receive.
void Messages::give(Request& receive, Unexpected& message) {
    const int peer = message.source;
    const StatusCode code = try_fit(receive, peer, message.header, message.nbytes);
    if (message.is_rts) {
        return code == StatusCode::done ? begin_receive(receive, peer, message.number)
                                        : refuse_rts(peer, message.number, code);
    }
    if (code == StatusCode::done) {
        copy_bytes(receive.target, message.body.data(), message.body.size());
        complete(receive);
    }
    forget(peer, message.nbytes + message_overhead);
}

// An eager message is not kept any more.
void Messages::forget(int peer, std::uint64_t nbytes) {
    if (peer == rank_) {
        num_kept_of_self_ -= nbytes;
    } else {
        count_received(peer, nbytes);
    }
}

// Has the data of a large message sent.
void Messages::begin_receive(Request& receive, int peer, std::uint64_t number) {
    if (peer == rank_) {
        return receive_from_self(receive, number);
    }
    try {
        if (!arrivals_.emplace(std::pair(peer, number), &receive).second) {
            complete(receive, {StatusCode::corrupt, peer});  // two messages cannot have one number
            return;
        }
    } catch (const std::bad_alloc&) {
        complete(receive, {StatusCode::no_memory, peer});
        return tell_no_memory(peer, number);
    }
    receive.number = number;
    set_matched(receive, peer);
    try {
        send_cts(peer, number);
    } catch (const std::bad_alloc&) {
        complete(receive, {StatusCode::no_memory, peer});
        return;
    }
    if (receive.nbytes == 0) {
        complete(receive);  // there is no data to wait for
    }
}

Request* Messages::find_send(int peer, std::uint64_t number) const {
    const auto found = sends_.find(number);
    return found != sends_.end() && found->second->peer == peer ? found->second : nullptr;
}

Request* Messages::on_cts(int peer, std::uint64_t number) {
    Request* const send = find_send(peer, number);
    if (send == nullptr || send->state() != Request::State::pending) {
        return nullptr;
    }
    send->set_matched();
    try {
        begin_data(*send);
    } catch (const std::bad_alloc&) {
        end_data(*send);
        complete(*send, {StatusCode::no_memory, peer});
    }
    return send;
}

void Messages::on_taken(int peer, std::uint64_t number, StatusCode code) {
    Request* const send = find_send(peer, number);
    if (send != nullptr && send->state() == Request::State::pending) {
        complete(*send, code == StatusCode::done ? Status{} : Status{StatusCode::no_memory, peer});
    }
}

void Messages::on_refused(int peer, bool is_lost) {
    bool is_told = false;
    end_those(peer, [&](const Request& one) {
        const bool is_waiting = one.is_send && one.state() == Request::State::pending;
        is_told = is_told || is_waiting;
        return is_waiting ? Status{StatusCode::no_memory, peer} : Status{};
    });
    is_refused_[static_cast<std::size_t>(peer)] = is_lost && !is_told;
}

void Messages::on_withdraw(int peer, std::uint64_t number) {
    if (queue_.take_rts(peer, number) != nullptr) {
        return;
    }
    if (Request* const receive = find_arrival(peer, number)) {
        match_again(*receive);
    }
}

Request* Messages::find_arrival(int peer, std::uint64_t number) const {
    const auto found = arrivals_.find({peer, number});
    return found == arrivals_.end() ? nullptr : found->second;
}

void Messages::match_again(Request& receive) {
    end_data(receive);
    arrivals_.erase({receive.found_source, receive.number});
    receive.transfer.reset();
    receive.set_pending();
    move_to(receive.takes_any_source ? -1 : receive.peer, receive);
    if (!match(receive)) {
        queue_.post_again(receive);
    }
}

// -- messages to oneself -----------------------------------------------------------------------------

void Messages::send_to_self(Request& send, Bytes header) {
    const std::uint64_t cost = send.nbytes + message_overhead;
    if (send.nbytes <= eager_limit && num_kept_of_self_ + cost <= unexpected_limit_) {
        on_eager(rank_, send.tag, header, {send.source, send.nbytes}, {nullptr, nullptr});
        num_kept_of_self_ += cost;  // which was taken off already if it is not kept
        send.finish({});
        return;
    }
    send.number = ++last_number_;
    sends_.emplace(send.number, &send);
    track(send);
    try {
        on_rts(rank_, send.tag, send.number, send.nbytes, header);
    } catch (const std::bad_alloc&) {
        complete(send, {StatusCode::no_memory, rank_});
    }
}

// Both ends of a large message are here; a send that is given up takes its RTS along.
void Messages::receive_from_self(Request& receive, std::uint64_t number) {
    Request& send = *sends_.at(number);
    copy_bytes(receive.target, send.source, send.nbytes);
    complete(receive);
    complete(send);
}

// -- what cannot succeed -----------------------------------------------------------------------------

void Messages::check() {
    if (!has_in_flight()) {
        return;
    }
    const Status error = group_error();
    for (int peer = 0; peer < size(); ++peer) {
        if (error.failed()) {
            fail_all(peer, error);
        } else if (!in_flight(peer).empty()) {
            check_peer(peer);
        }
    }
    if (const Status status = takes_from_any() ? loss_of_any() : Status{}; status.failed()) {
        fail_from_any(status);
    }
    expire();
}

void Messages::check_peer(int peer) {
    if (peer == rank_) {
        while (is_closing(rank_) && !in_flight(rank_).empty()) {  // nothing new comes of this rank
            end(*in_flight(rank_).front(), {StatusCode::given_up});
        }
        return;
    }
    const bool gone = is_gone(peer), closing = gone || is_closing(peer);
    if (closing) {
        read(peer);  // what came before it went still counts
        end_those(peer, [&](const Request& one) { return trouble(one, gone, closing); });
    } else if (lacks_heartbeat(peer)) {
        fail_all(peer, {StatusCode::no_heartbeat, peer});
    }
}

// Why nothing more can be had from any rank: one has died, or nobody is left who sends. What came before has been read.
Status Messages::loss_of_any() {
    Status status;
    int last = -1;
    bool is_anybody_left = size() == 1;
    for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank_) {
            continue;
        }
        const bool gone = is_gone(peer);
        if (gone || is_closing(peer)) {
            read(peer);
            last = peer;
        } else {
            is_anybody_left = true;
        }
        if (gone && !has_closed(peer)) {
            status = loss(peer);
        } else if (!gone && lacks_heartbeat(peer)) {
            status = {StatusCode::no_heartbeat, peer};
        }
    }
    return status.failed() || is_anybody_left ? status : loss(last);
}

Status Messages::trouble(const Request& request, bool is_gone, bool is_closing) const {
    if (is_gone) {
        return loss(request.flight);
    }
    // Who closes still does the calls it has in flight, and those of the whole group.
    const bool is_matched = request.state() == Request::State::matched;
    const bool is_internal = !request.takes_any_tag && request.tag >= first_internal_tag;
    if (!is_closing || is_matched || is_internal) {
        return {};
    }
    return request.is_send && !receives_no_more(request.flight) ? Status{} : loss(request.flight);
}

void Messages::fail_all(int peer, const Status& status) {
    while (!in_flight(peer).empty()) {
        end(*in_flight(peer).front(), status);
    }
    fail_from_any(status);
}

void Messages::fail_from_any(const Status& status) {
    while (!from_any_.empty()) {
        end(*from_any_.front(), status);
    }
}

void Messages::fail_receives(int peer, const Status& status) {
    end_those(peer, [&](const Request& one) { return one.is_send ? Status{} : status; });
    fail_from_any(status);
}

// Whether some rank that a request waits for is not held in another call. Without the lock.
bool Messages::is_anybody_free(const Request& request, std::int64_t stuck_ns) const {
    for (int peer = 0; peer < size(); ++peer) {
        const bool is_awaited = request.takes_any_source || request.peer == peer;
        if (peer != rank_ && is_awaited && held_ns(peer) < stuck_ns) {
            return true;
        }
    }
    return false;
}

void Messages::expire() {
    const std::int64_t now = deadlines_.empty() ? 0 : core::now_ns();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
        Request& late = *deadlines_.begin()->second;
        if (now < late.last_deadline_ns && is_anybody_free(late, late.stuck_ns)) {
            deadlines_.erase(deadlines_.begin());
            late.deadline_ns = std::min(now + patient_look_ns, late.last_deadline_ns);
            deadlines_.emplace(late.deadline_ns, &late);
        } else {
            end(late, {StatusCode::late, late.peer});
        }
    }
}

}  // namespace ferrodist::core
