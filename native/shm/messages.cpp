// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/messages.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/memory.hpp"

namespace ferrodist::shm {
namespace {

constexpr std::size_t most_rings = 4;  // per peer

using core::Request;

}  // namespace

Messages::Messages(Group& group)
    : core::Messages(group.rank(), group.size()), group_(group), progress_(group.world().progress()),
      peers_(static_cast<std::size_t>(group.size())) {
    const Lock guard = lock();
    progress_.add(*this);
}

Messages::~Messages() {
    if (is_of_ancestor()) {
        return;
    }
    const Lock guard = lock();
    progress_.remove(*this);
    for (int peer = 0; peer < size(); ++peer) {
        fail_all(peer, {StatusCode::given_up});
        for (const std::size_t block : at(peer).out ? at(peer).out->blocks() : std::vector<std::size_t>{}) {
            group_.keep_block(block);
        }
        for (const Ring& ring : at(peer).rings) {
            group_.keep_block(ring.offset);
        }
    }
}

// -- waiting -----------------------------------------------------------------------------------------

core::Status Messages::wait(Request& request, const core::WaitOptions& options, bool holds_caller) {
    if (!holds_caller || !request.is_send || request.is_complete()) {
        return progress_.wait(*this, request, options);
    }
    RankWords& mine = group_.words(group_.rank());
    // Relaxed, both: hints for those who look for a cycle. Pair with find_send_cycle.
    mine.cycle_next.store(0, std::memory_order_relaxed);
    mine.sending_to.store(static_cast<std::uint32_t>(request.peer) + 1, std::memory_order_relaxed);
    const core::Status status = progress_.wait(*this, request, options);
    if (status.failed()) {
        // While it still shows that it sends: of ranks that give up at once, the first to be done here sees all of
        // them, and notes the cycle for the others.
        find_send_cycle(request.peer);
    }
    mine.sending_to.store(0, std::memory_order_release);  // pairs with the load in find_send_cycle: the note is there
    return status;
}

namespace {

// Follows words that name the next rank + 1, back to the first rank; empty if they do not lead there.
template <class Next>
std::vector<int> follow(int first, int world, Next next) {
    std::vector<int> cycle{first};
    for (int rank = next(first); rank != first; rank = next(rank)) {
        if (rank < 0 || rank >= world || std::find(cycle.begin(), cycle.end(), rank) != cycle.end()) {
            return {};
        }
        cycle.push_back(rank);
    }
    return cycle;
}

}  // namespace

std::vector<int> Messages::find_send_cycle(int peer) {
    const int me = group_.rank();
    // Acquire: pairs with wait.
    std::vector<int> cycle = follow(me, group_.size(), [&](int rank) {
        return rank == me ? peer : static_cast<int>(group_.words(rank).sending_to.load(std::memory_order_acquire)) - 1;
    });
    for (std::size_t i = 0; i < cycle.size(); ++i) {  // for the others: their chain ends here soon
        const auto next = static_cast<std::uint32_t>(cycle[(i + 1) % cycle.size()]) + 1;
        group_.words(cycle[i]).cycle_next.store(next, std::memory_order_relaxed);  // pairs with the load below
    }
    if (cycle.empty()) {
        // Relaxed: pairs with the store above, by another rank.
        cycle = follow(me, group_.size(), [&](int rank) {
            return static_cast<int>(group_.words(rank).cycle_next.load(std::memory_order_relaxed)) - 1;
        });
    }
    std::rotate(cycle.begin(), std::min_element(cycle.begin(), cycle.end()), cycle.end());
    return cycle;
}

// -- records that go out -------------------------------------------------------------------------------

QueueWriter& Messages::out(int peer) {
    Peer& to = at(peer);
    if (!to.out) {
        to.out.emplace(group_.world().arena(), group_.peer(peer).header().doorbell);
        // Pairs with the load in reader; seq_cst for the doorbell.
        group_.layout().queue(static_cast<std::size_t>(group_.rank()), static_cast<std::size_t>(peer))
            .store(to.out->offset(), std::memory_order_seq_cst);
    }
    return *to.out;
}

void Messages::append(int peer, Record::Kind kind, std::uint64_t number, std::uint32_t tag, ByteView header,
                      ByteView body) {
    out(peer).append(kind, tag, number, header, body);
}

std::uint64_t Messages::eager_received(int peer) { return out(peer).num_received(); }

void Messages::send_eager(Request& send, core::Bytes header) {
    append(send.peer, Record::eager, 0, send.tag, header, {send.source, send.nbytes});
    count_moved(send);
}

void Messages::send_rts(Request& send, core::Bytes header) {
    const std::uint64_t nbytes = send.nbytes;
    append(send.peer, Record::rts, send.number, send.tag, header, std::as_bytes(std::span(&nbytes, 1)));
}

void Messages::send_withdraw(int peer, std::uint64_t number) {
    try {
        append(peer, Record::withdraw, number);
    } catch (const std::bad_alloc&) {
        // Its receiver hears it when it asks for the data.
    }
}

// -- records that come in ------------------------------------------------------------------------------

// The queue of a rank, as soon as it has one.
QueueReader* Messages::reader(int peer) {
    Peer& from = at(peer);
    if (!from.in) {
        // Pairs with the store in out; seq_cst for the doorbell that is slept on.
        const std::uint64_t offset = group_.layout().queue(static_cast<std::size_t>(peer),
                                                           static_cast<std::size_t>(group_.rank()))
                                         .load(std::memory_order_seq_cst);
        if (offset == 0) {
            return nullptr;
        }
        from.in.emplace(group_.peer(peer), offset);
    }
    return &*from.in;
}

bool Messages::read_records(int peer) {
    QueueReader* const queue = reader(peer);
    bool has_moved = false;
    while (queue != nullptr && !at(peer).is_corrupt) {
        Message message;
        const QueueReader::Look poll = queue->front(message);
        if (poll == QueueReader::Look::nothing) {
            break;
        }
        at(peer).is_corrupt = poll == QueueReader::Look::corrupt;
        try {
            if (at(peer).is_corrupt || !read_one(peer, message)) {
                break;
            }
        } catch (const std::bad_alloc&) {  // it stays where it is, and so does all behind it
            starve(peer);
            break;
        }
        queue->pop();
        has_moved = true;
    }
    if (at(peer).is_corrupt) {
        fail_all(peer, {StatusCode::corrupt, peer});
    }
    return has_moved;
}

// False if the record has to stay for a while.
bool Messages::read_one(int peer, const Message& message) {
    switch (message.kind) {
        case Record::eager:
            if (at(peer).partial || message.num_there() < message.body.size()) {
                return read_long(peer, message);
            }
            on_eager(peer, message.tag, message.header, message.body, {nullptr, nullptr});
            return true;
        case Record::rts: {
            std::uint64_t nbytes = 0;
            at(peer).is_corrupt = message.body.size() != sizeof nbytes;
            if (!at(peer).is_corrupt) {
                std::memcpy(&nbytes, message.body.data(), sizeof nbytes);
                on_rts(peer, message.tag, message.number, nbytes, message.header);
            }
            return true;
        }
        case Record::cts:
            if (on_cts(peer, message.number) == nullptr) {
                send_withdraw(peer, message.number);
            }
            return true;
        case Record::data:
            on_data(peer, message);
            return true;
        case Record::taken:
            if (message.number == 0) {
                on_refused(peer, false);
            } else {
                on_taken(peer, message.number, static_cast<core::StatusCode>(message.tag));
            }
            return true;
        case Record::withdraw:
            on_withdraw(peer, message.number);
            std::erase(at(peer).given_up, message.number);
            return true;
        default:
            at(peer).is_corrupt = true;
            return true;
    }
}

// There is no memory for the next message of a rank: who waits for one behind it must not wait for ever, nor must its
// sender. Both may try again.
void Messages::starve(int peer) {
    constexpr std::int64_t pause_ns = 20'000'000;
    fail_receives(peer, {StatusCode::no_memory, peer});
    const std::int64_t now = now_ns();
    if (now - at(peer).told_ns >= pause_ns) {
        at(peer).told_ns = now;
        tell_no_memory(peer, 0);
    }
}

// A long eager message that is not all there: its receiver copies what is.
bool Messages::read_long(int peer, const Message& message) {
    std::optional<Partial>& partial = at(peer).partial;
    if (!partial) {
        bool is_dropped = false;
        Request* const receive = match_eager(peer, message.tag, message.header, message.body.size(), is_dropped);
        if (receive == nullptr && !is_dropped) {
            return false;
        }
        if (receive != nullptr) {
            set_matched(*receive, peer);
        }
        partial.emplace(Partial{receive});
    }
    return go_on(peer, message);
}

bool Messages::go_on(int peer, const Message& message) {
    Partial& partial = *at(peer).partial;
    const std::size_t num_there = message.num_there();
    if (partial.receive != nullptr && num_there > partial.num_copied) {
        copy_bytes(partial.receive->target + partial.num_copied, message.body.data() + partial.num_copied,
                   num_there - partial.num_copied);
    }
    partial.num_copied = num_there;
    if (num_there < message.body.size()) {
        return false;
    }
    Request* const receive = partial.receive;
    at(peer).partial.reset();
    if (receive != nullptr) {
        complete(*receive);
    }
    count_received(peer, message.body.size() + core::message_overhead);
    return true;
}

// -- data ----------------------------------------------------------------------------------------------

bool Messages::advance() {
    bool has_moved = false;
    int peer = next_peer_;
    for (int i = 0; i < size() && (has_in_flight() || has_unattended()); ++i) {
        const bool is_needed = takes_from_any() || !in_flight(peer).empty() || !at(peer).given_up.empty();
        const bool moves = is_needed && advance(peer);
        peer = peer + 1 < size() ? peer + 1 : 0;
        if (moves) {
            has_moved = true;
            next_peer_ = peer;  // so that no rank is read only when the others have nothing to say
        }
    }
    return has_moved;
}

bool Messages::advance(int peer) {
    bool has_moved = read_records(peer);
    // By index: what completes leaves these lists.
    for (std::size_t i = at(peer).sending.size(); i-- > 0;) {
        has_moved = fill(*at(peer).sending[i]) || has_moved;
    }
    for (std::size_t i = at(peer).receiving.size(); i-- > 0;) {
        has_moved = empty(*at(peer).receiving[i]) || has_moved;
    }
    return serve_waiting(peer) || has_moved;
}

void Messages::begin_data(Request& send) {
    at(send.peer).waiting.push_back(&send);
    serve_waiting(send.peer);
}

// Gives rings to sends that wait for one.
bool Messages::serve_waiting(int peer) {
    bool has_moved = false;
    auto& waiting = at(peer).waiting;
    while (!waiting.empty()) {
        try {
            Ring* const ring = free_ring(peer);
            if (ring == nullptr) {
                break;
            }
            Request& send = *waiting.front();
            start_stream(send, *ring);
            waiting.pop_front();
            at(peer).sending.push_back(&send);
        } catch (const std::bad_alloc&) {
            Request& send = *waiting.front();
            end_data(send);
            complete(send, {StatusCode::no_memory, peer});
        }
        has_moved = true;
    }
    return has_moved;
}

Messages::Ring* Messages::free_ring(int peer) {
    auto& rings = at(peer).rings;
    for (Ring& ring : rings) {
        if (!ring.is_out && ring.stream->is_over()) {
            return &ring;
        }
    }
    if (rings.size() == most_rings) {
        return nullptr;
    }
    Arena& arena = group_.world().arena();
    const std::size_t offset = arena.allocate(Stream::ring_start + Stream::ring_nbytes);
    auto* const stream = new (arena.base() + offset) Stream{};
    stream->emptied.store(Stream::over, std::memory_order_relaxed);  // nobody has seen it
    return &rings.emplace_back(Ring{offset, stream});
}

void Messages::start_stream(Request& send, Ring& ring) {
    auto data = std::make_unique<SendData>(ring);
    const auto place = group_.world().arena().find(send.source, send.nbytes);
    data->is_in_arena = place.has_value();
    // Relaxed: the receiver looks at them only when it has seen the record that is appended below.
    ring.stream->filled.store(0, std::memory_order_relaxed);
    ring.stream->emptied.store(0, std::memory_order_relaxed);
    ring.stream->stage.store(Stream::active, std::memory_order_relaxed);
    const DataPlace where{ring.offset, place.value_or(0), ring.next_piece};
    data->first_piece = ring.next_piece;
    ring.next_piece = (ring.next_piece + count_pieces(send.nbytes)) % Stream::num_pieces;
    try {
        append(send.peer, Record::data, send.number, 0, {}, std::as_bytes(std::span(&where, 1)));
    } catch (...) {
        ring.stream->emptied.store(Stream::over, std::memory_order_relaxed);  // nobody has seen it
        throw;
    }
    ring.is_out = true;
    send.transfer = std::move(data);
}

// Moves a send along; tells whether anything was done.
bool Messages::fill(Request& send) {
    auto& data = static_cast<SendData&>(*send.transfer);
    Stream& stream = *data.ring.stream;
    const std::uint32_t num_pieces = count_pieces(send.nbytes);
    // Pairs with the receiver's stores: the pieces it has emptied may be filled again.
    const std::uint32_t emptied = stream.emptied.load(std::memory_order_seq_cst);
    if (emptied != Stream::over && !data.is_in_arena && data.num_filled < num_pieces) {
        if (data.num_filled - emptied >= Stream::num_pieces) {
            return false;
        }
        const Piece piece(send.nbytes, data.num_filled, data.first_piece);
        std::byte* const ring = group_.world().arena().base() + data.ring.offset + Stream::ring_start;
        copy_bytes(ring + piece.place, send.source + piece.start, piece.nbytes);
        // Pairs with the receiver's load in empty; seq_cst for the doorbell.
        stream.filled.store(++data.num_filled, std::memory_order_seq_cst);
        ring_doorbell(send.peer);
        if (data.num_filled < num_pieces) {
            return true;
        }
    }
    if (emptied != Stream::over && (data.is_in_arena || data.num_filled < num_pieces)) {
        return false;
    }
    data.ring.is_out = false;
    std::erase(at(send.peer).sending, &send);
    complete(send);
    return true;
}

void Messages::on_data(int peer, const Message& message) {
    DataPlace where{};
    const bool is_sized = message.body.size() == sizeof where;
    if (is_sized) {
        std::memcpy(&where, message.body.data(), sizeof where);
    }
    const shm::Peer& theirs = group_.peer(peer);
    auto* const stream = !is_sized || where.stream % alignof(Stream) != 0
                             ? nullptr
                             : reinterpret_cast<Stream*>(theirs.at(where.stream, Stream::ring_start));
    if (stream == nullptr) {
        at(peer).is_corrupt = true;
        return;
    }
    Request* const receive = find_arrival(peer, message.number);
    if (receive == nullptr || receive->transfer != nullptr) {
        std::erase(at(peer).given_up, message.number);
        finish_stream(*stream, peer);  // it was given up meanwhile
        return;
    }
    auto data = std::make_unique<ReceiveData>();
    data->stream = stream;
    data->is_in_arena = where.payload != 0;
    data->first_piece = static_cast<std::uint32_t>(where.first_piece % Stream::num_pieces);
    data->source = data->is_in_arena
                       ? theirs.at(where.payload, receive->nbytes)
                       : theirs.at(where.stream + Stream::ring_start, Stream::ring_nbytes);
    at(peer).is_corrupt = data->source == nullptr;
    if (!at(peer).is_corrupt) {
        receive->transfer = std::move(data);
        at(peer).receiving.push_back(receive);
    }
}

// Moves a receive along; tells whether anything was done.
bool Messages::empty(Request& receive) {
    auto& data = static_cast<ReceiveData&>(*receive.transfer);
    const int peer = receive.found_source;
    const std::uint32_t num_pieces = data.is_in_arena ? 1 : count_pieces(receive.nbytes);
    if (data.is_in_arena) {
        copy_bytes(receive.target, data.source, receive.nbytes);
        data.num_emptied = 1;
    } else {
        // Pairs with the store in fill: the piece was written before. Seq_cst for the doorbell.
        const std::uint32_t filled = data.stream->filled.load(std::memory_order_seq_cst);
        if (filled - data.num_emptied - 1 >= Stream::num_pieces) {
            if (data.stream->stage_now() != Stream::broken) {
                return false;
            }
            match_again(receive);
            return true;
        }
        const Piece piece(receive.nbytes, data.num_emptied, data.first_piece);
        copy_bytes(receive.target + piece.start, data.source + piece.place, piece.nbytes);
        ++data.num_emptied;
    }
    if (data.num_emptied < num_pieces) {
        // Pairs with the load in fill; seq_cst for the doorbell.
        data.stream->emptied.store(data.num_emptied, std::memory_order_seq_cst);
        ring_doorbell(peer);
        return true;
    }
    if (!data.stream->move(Stream::active, Stream::ended)) {
        match_again(receive);  // what was copied may be anything
        return true;
    }
    std::erase(at(peer).receiving, &receive);
    finish_stream(*data.stream, peer);
    complete(receive);
    return true;
}

// Lets the sender use a stream again: nothing of it is touched any more.
void Messages::finish_stream(Stream& stream, int peer) {
    // Pairs with the load in fill and free_ring; seq_cst for the doorbell.
    stream.emptied.store(Stream::over, std::memory_order_seq_cst);
    ring_doorbell(peer);
}

void Messages::end_data(Request& request) {
    const int peer = request.is_send ? request.peer : request.found_source;
    Peer& other = at(peer);
    if (other.partial && other.partial->receive == &request) {
        other.partial->receive = nullptr;
    }
    if (request.is_send && request.transfer == nullptr) {
        std::erase(other.waiting, &request);
        send_withdraw(peer, request.number);
    } else if (request.is_send) {
        Ring& ring = static_cast<SendData&>(*request.transfer).ring;
        ring.stream->move(Stream::active, Stream::broken);
        ring.is_out = false;
        std::erase(other.sending, &request);
        ring_doorbell(peer);
    } else if (request.transfer != nullptr) {
        std::erase(other.receiving, &request);
        finish_stream(*static_cast<ReceiveData&>(*request.transfer).stream, peer);
    } else if (find_arrival(peer, request.number) == &request) {
        other.given_up.push_back(request.number);  // its sender has to be let go when the data begins
        progress_.note_unattended();
    }
}

bool Messages::has_unattended() const {
    if (core::Messages::has_unattended()) {
        return true;
    }
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (!peers_[peer].given_up.empty() && !is_gone(static_cast<int>(peer))) {
            return true;
        }
    }
    return false;
}

// -- what is counted, and who is there -----------------------------------------------------------------

void Messages::count_moved(const Request& request) {
    World& world = group_.world();
    (request.is_send ? world.sent_nbytes : world.received_nbytes)
        .fetch_add(request.nbytes, std::memory_order_relaxed);  // a statistic
}

void Messages::count_received(int peer, std::uint64_t nbytes) {
    at(peer).num_received += nbytes;
    at(peer).in->set_received(at(peer).num_received);
}

void Messages::count_receives(int change) {
    // Seq_cst: pairs with the look in receives_no_more.
    group_.words(group_.rank()).num_receives.fetch_add(static_cast<std::uint32_t>(change), std::memory_order_seq_cst);
}

core::Status Messages::group_error() const {
    return {group_.has_error(0) ? StatusCode::group_error : StatusCode::done};
}

bool Messages::is_closing(int peer) const {
    // Pairs with Group::announce_closing: what was sent before is seen after this.
    return group_.words(peer).presence.load(std::memory_order_seq_cst) >= Presence::closing;
}

bool Messages::has_closed(int peer) const {
    // Pairs with Group::announce_closing, which comes before the rank is gone.
    return group_.words(peer).has_closed.load(std::memory_order_acquire) != 0;
}

bool Messages::receives_no_more(int peer) const {
    // Pairs with count_receives: after is_closing no new ones are posted.
    return group_.words(peer).num_receives.load(std::memory_order_seq_cst) == 0;
}

std::uint64_t Messages::moves_of(const Request& request) const {
    if (request.transfer == nullptr) {
        return 0;
    }
    return request.is_send ? static_cast<const SendData&>(*request.transfer).num_filled
                           : static_cast<const ReceiveData&>(*request.transfer).num_emptied;
}

bool Messages::lacks_heartbeat(int peer) {
    Peer& other = at(peer);
    const std::int64_t now = now_ns(), passed = other.polled_ns == 0 ? 0 : now - other.polled_ns;
    other.polled_ns = now;
    return other.heartbeat_timeout.is_too_long(group_.peer(peer), group_.world().heartbeat_timeout_ns(), passed);
}

}  // namespace ferrodist::shm
