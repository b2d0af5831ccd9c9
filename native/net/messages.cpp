// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/messages.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "net/group.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {

using core::Request;

Messages::Messages(Group& group, int size)
    : core::Messages(group.rank(), size), group_(group), peers_(static_cast<std::size_t>(size)) {}

Messages::~Messages() = default;

Lock Messages::lock() { return group_.mesh().lock(); }
bool Messages::is_of_ancestor() const { return group_.mesh().is_of_ancestor(); }

void Messages::end_all() {
    for (int peer = 0; peer < size(); ++peer) {
        fail_all(peer, {StatusCode::given_up});
    }
}

// -- waiting ---------------------------------------------------------------------------------------

core::Status Messages::wait(Request& request, const core::WaitOptions& options, bool holds_caller) {
    if (request.is_complete()) {
        return {};
    }
    Mesh& mesh = group_.mesh();
    Lock guard = mesh.lock();
    Waiter waiter(mesh, guard, options);
    if (holds_caller && request.is_send) {
        group_.begin_send(request.peer);
    }
    check();
    std::uint64_t moves = 0;
    while (!request.is_complete()) {
        const Status status = waiter.until_change(mesh.epoch());
        if (status.code == StatusCode::late && may_still_come(request, options)) {
            options.deadline_ns = core::now_ns() + core::patient_look_ns;
        } else if (status.failed()) {
            return status;  // until it is withdrawn it shows whom it is for: others may ask
        }
        if (waiter.is_time_to_poll()) {
            check();
            if (const std::uint64_t now = request.is_complete() ? moves : moves_of(request); now != moves) {
                moves = now;
                waiter.progressed();
            }
        }
    }
    if (holds_caller && request.is_send) {
        group_.set_sending_to(-1);
    }
    return {};
}

bool Messages::test(Request& request) {
    if (!request.is_complete()) {
        poll();
    }
    return request.is_complete();
}

void Messages::poll() {
    Lock guard = lock();
    group_.mesh().poll(guard);
}

void Messages::note_posted(const Request& request) {
    // The thread of the mesh looks at deadlines when it wakes, which is within a second.
    constexpr std::int64_t longest_nap_ns = 1'100'000'000;
    if (request.deadline_ns != 0 && request.deadline_ns < core::now_ns() + longest_nap_ns) {
        group_.mesh().wake_background();
    }
}

void Messages::note_completed() { group_.mesh().note_change(); }

// -- frames that go out ----------------------------------------------------------------------------

void Messages::send_frame(int peer, FrameKind kind, std::uint64_t number, std::uint64_t code) {
    group_.send(peer, {.kind = kind, .sequence = number, .fingerprint = code});
}

void Messages::send_eager(Request& send, core::Bytes header) {
    std::vector<std::byte> whole(2 + header.size() + send.nbytes);
    const auto length = static_cast<std::uint16_t>(header.size());
    std::memcpy(whole.data(), &length, 2);
    std::copy(header.begin(), header.end(), whole.begin() + 2);
    std::copy_n(send.source, send.nbytes, whole.begin() + 2 + static_cast<std::ptrdiff_t>(header.size()));
    group_.send(send.peer, {.kind = FrameKind::eager, .tag = send.tag, .fingerprint = send.nbytes}, whole);
}

void Messages::send_rts(Request& send, core::Bytes header) {
    group_.send(send.peer, {.kind = FrameKind::rts, .tag = send.tag, .sequence = send.number,
                            .fingerprint = send.nbytes}, header);
}

void Messages::send_withdraw(int peer, std::uint64_t number) {
    group_.set_sending_to(-1);
    send_frame(peer, FrameKind::withdraw, number);
}

void Messages::begin_data(Request& send) {
    auto data = std::make_unique<SendData>();
    Ticket& ticket = data->ticket;
    send.transfer = std::move(data);
    sending_.push_back(&send);
    Mesh& mesh = group_.mesh();
    Link& link = mesh.link(group_.world_rank(send.peer));
    const std::size_t piece = mesh.options().piece_nbytes;
    const core::Bytes all(send.source, send.nbytes);
    for (std::size_t begin = 0; begin < all.size(); begin += piece) {
        const Header header{.kind = FrameKind::bulk, .group = group_.id(), .sequence = send.number};
        link.send_in_place(header, all.subspan(begin, std::min(piece, all.size() - begin)), ticket);
    }
    link.flush();
}

void Messages::finish_sent() {
    for (std::size_t i = sending_.size(); i-- > 0;) {
        Request& send = *sending_[i];
        if (static_cast<SendData&>(*send.transfer).ticket.pending == 0) {
            sending_.erase(sending_.begin() + static_cast<std::ptrdiff_t>(i));
            complete(send);
        }
    }
}

void Messages::end_data(Request& request) {
    Mesh& mesh = group_.mesh();
    if (request.is_send) {
        group_.set_sending_to(-1);
        std::erase(sending_, &request);
        if (request.transfer != nullptr) {  // else there was no memory for it
            mesh.link(group_.world_rank(request.peer)).detach(static_cast<SendData&>(*request.transfer).ticket);
        }
        send_frame(request.peer, FrameKind::abandoned, request.number);
    } else {
        mesh.link(group_.world_rank(request.found_source)).give_up_place(request.target, request.nbytes);
    }
}

// -- frames that come in ---------------------------------------------------------------------------

Messages::ReceiveData& Messages::data_of(Request& receive) {
    if (receive.transfer == nullptr) {
        receive.transfer = std::make_unique<ReceiveData>();
    }
    return static_cast<ReceiveData&>(*receive.transfer);
}

std::byte* Messages::place_for(int peer, const Header& header) {
    Request* const receive = find_arrival(peer, header.sequence);
    if (receive == nullptr || header.length > receive->nbytes - data_of(*receive).filled) {
        return nullptr;
    }
    return receive->target + data_of(*receive).filled;
}

void Messages::on_whole(int peer, const Header& header, Payload payload) {
    std::uint16_t length = 0;
    if (payload.size < sizeof length) {
        return;
    }
    const core::Bytes all = payload.bytes();
    std::memcpy(&length, all.data(), sizeof length);
    const std::size_t begins = sizeof length + std::size_t{length};
    if (begins <= all.size()) {
        core::OwnBytes memory(payload.memory.release(), [](std::byte* bytes) { core::Recycle{}(bytes); });
        on_eager(peer, header.tag, all.subspan(sizeof length, length), all.subspan(begins), std::move(memory));
    }
}

// There was no memory for a message.
void Messages::on_lost(int peer, const Header& header) {
    if (header.kind == FrameKind::eager) {
        count_received(peer, std::min(header.fingerprint, header.length) + core::message_overhead);
        core::Messages::on_lost(peer, header.tag, 0);
    } else {
        core::Messages::on_lost(peer, header.tag, header.sequence);
    }
}

void Messages::on_bulk(int peer, const Header& header, const Payload& payload) {
    Request* const receive = find_arrival(peer, header.sequence);
    if (receive == nullptr || payload.memory != nullptr) {
        return;
    }
    ReceiveData& data = data_of(*receive);
    data.filled += header.length;
    if (data.filled == receive->nbytes) {
        complete(*receive);
    }
}

void Messages::on_frame(int peer, const Header& header, Payload payload, bool is_void) {
    const bool is_message = header.kind == FrameKind::eager || header.kind == FrameKind::rts;
    if (!is_message) {
        return on_answer(peer, header, payload);
    }
    try {
        if (is_void) {
            on_lost(peer, header);
        } else if (header.kind == FrameKind::eager) {
            on_whole(peer, header, std::move(payload));
        } else {
            on_rts(peer, header.tag, header.sequence, header.fingerprint, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        on_lost(peer, header);
    }
}

void Messages::on_answer(int peer, const Header& header, const Payload& payload) {
    switch (header.kind) {
        case FrameKind::cts:
            if (on_cts(peer, header.sequence) == nullptr && find_send(peer, header.sequence) == nullptr) {
                send_frame(peer, FrameKind::abandoned, header.sequence);
            }
            return;
        case FrameKind::bulk:
            return on_bulk(peer, header, payload);
        case FrameKind::taken:
            return header.sequence == 0 ? on_refused(peer, true)
                                        : on_taken(peer, header.sequence, static_cast<core::StatusCode>(header.fingerprint));
        case FrameKind::withdraw:
        case FrameKind::abandoned:
            return on_withdraw(peer, header.sequence);
        case FrameKind::received:
            at(peer).num_acknowledged = header.sequence;
            return;
        default:
            return;
    }
}

// -- what is counted, and who is there -------------------------------------------------------------

void Messages::count_received(int peer, std::uint64_t nbytes) {
    Peer& from = at(peer);
    from.num_received += nbytes;
    if (from.num_received - from.num_told >= unexpected_limit() / 4) {
        from.num_told = from.num_received;
        group_.send(peer, {.kind = FrameKind::received, .sequence = from.num_received}, {}, true);
    }
}

void Messages::count_receives(int change) { group_.count_receives(change); }

core::Status Messages::group_error() const {
    return {group_.find_error(0) != nullptr ? StatusCode::group_error : StatusCode::done};
}

bool Messages::is_gone(int peer) const { return group_.is_gone(peer); }
bool Messages::is_closing(int peer) const { return group_.sends_no_more(peer); }
bool Messages::has_closed(int peer) const { return group_.has_closed(peer); }
bool Messages::receives_no_more(int peer) const { return group_.takes_no_more(peer); }
core::Status Messages::loss(int peer) const { return group_.loss(peer); }
std::int64_t Messages::held_ns(int peer) const { return group_.mesh().held_ns(group_.world_rank(peer)); }

std::uint64_t Messages::moves_of(const Request& request) const {
    if (request.transfer == nullptr) {
        return 0;
    }
    return request.is_send ? static_cast<const SendData&>(*request.transfer).ticket.pending
                           : static_cast<const ReceiveData&>(*request.transfer).filled;
}

bool Messages::lacks_heartbeat(int peer) { return group_.mesh().lacks_heartbeat(group_.world_rank(peer)); }

}  // namespace ferrodist::net
