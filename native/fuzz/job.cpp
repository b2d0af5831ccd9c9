// SPDX-License-Identifier: MIT OR Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "fuzz/job.hpp"
#include "net/waiter.hpp"
#include "net/plan.hpp"

namespace ferrodist::fuzz {
namespace {

using net::FrameKind;
using net::Group;
using core::Status;

constexpr std::int64_t moment = 10'000;  // nanoseconds

// A wait that is over at once.
class Wait {
public:
    explicit Wait(net::Mesh& mesh) : options{&hook_, core::now_ns() + moment, mesh.spins()} {}

private:
    core::ProgressHook hook_;

public:
    const core::WaitOptions options;
};

}  // namespace

void Job::read_all() {
    net::Lock guard = mesh_->lock();
    const Wait wait(*mesh_);
    net::Waiter waiter(*mesh_, guard, wait.options);
    while (!waiter.until_change(mesh_->epoch()).failed()) {
    }
}

void Job::exchange() {
    const Wait wait(*mesh_);
    sequence_ += script_.below(2);
    const Buffer out(script_.size() % piece);
    Buffer in(script_.size() % piece);
    const int to = script_.one_in(3) ? -1 : peer(), from = script_.one_in(3) ? -1 : peer();
    Group& with = group();
    const auto rank = [&](int one) { return one < with.size() && one != with.rank() ? one : -1; };
    const net::Task task{nullptr, nullptr, false, sequence_, script_.below(3)};
    net::exchange(with, 1, rank(to), out, rank(from), in.data(), in.size(), task, wait.options);
}

void Job::send_message() {
    Buffer content = script_.one_in(2) ? Buffer(large + script_.size()) : script_.bytes(script_.size());
    const Buffer header = script_.bytes(script_.below(12));
    Sent& one = sent_.emplace_back();
    one.content = std::move(content);
    one.request.peer = peer();
    one.request.tag = tag();
    one.request.source = one.content.data();
    one.request.nbytes = one.content.size();
    one.request.deadline_ns = script_.one_in(4) ? core::now_ns() + moment : 0;
    group_->messages().isend(one.request, header);
    if (one.request.is_complete()) {
        sent_.pop_back();
    }
}

// What may come from those a message is for, or from others.
void Job::answer_rts() {
    constexpr FrameKind kinds[] = {FrameKind::cts, FrameKind::taken, FrameKind::cts, FrameKind::abandoned,
                                   FrameKind::withdraw};
    if (sent_.empty()) {
        return;
    }
    const Sent& one = sent();
    Voice& from = script_.one_in(4) ? voice() : voice_of(one.request.peer);
    for (std::size_t i = script_.below(4); i > 0; --i) {
        from.say({.kind = kinds[script_.below(std::size(kinds))], .sequence = one.request.number});
    }
}

void Job::wait_for_message() {
    if (sent_.empty()) {
        return;
    }
    Sent& one = sent();
    const Wait wait(*mesh_);
    const Status status = group_->messages().wait(one.request, wait.options, script_.one_in(2));
    if (status.failed() && script_.one_in(2)) {
        return;
    }
    if (status.failed() && !group_->messages().cancel(one.request, status)) {
        group_->messages().abandon(one.request, status);
    }
    sent_.remove_if([&](const Sent& other) { return &other == &one; });
}

void Job::receive_message(int from, std::uint32_t tag, std::size_t nbytes) {
    const Wait wait(*mesh_);
    Buffer target(nbytes);
    const Buffer header = script_.bytes(script_.one_in(4) * script_.below(12));
    core::Request receive;
    receive.peer = from;
    receive.tag = tag;
    receive.target = target.data();
    receive.nbytes = nbytes;
    receive.header = header;
    group_->messages().irecv(receive);
    if (const Status status = group_->messages().wait(receive, wait.options, false); status.failed()) {
        group_->messages().abandon(receive, status);
    }
}

// An RTS, what may come of it, and somebody who wants it.
void Job::receive_rts() {
    constexpr FrameKind kinds[] = {FrameKind::bulk, FrameKind::abandoned, FrameKind::bulk, FrameKind::withdraw,
                                   FrameKind::rts};
    const int from = peer();
    const std::size_t nbytes = script_.one_in(4) ? large : 1 + script_.below(100);
    net::Header header{.kind = FrameKind::rts, .tag = tag(), .sequence = script_.below(3), .fingerprint = nbytes};
    voice_of(from).say(header);
    read_all();
    for (std::size_t i = script_.below(5); i > 0; --i) {
        header.kind = kinds[script_.below(std::size(kinds))];
        const bool has_content = header.kind == FrameKind::bulk;
        voice_of(from).say(script_, header, Buffer(has_content ? script_.below(2 + nbytes % piece) : 0));
    }
    receive_message(from, header.tag, nbytes);
}

// A step of a collective: a message of several pieces to a rank, and one from it that is reduced in.
void Job::execute() {
    const int with = peer();
    const std::uint64_t nbytes = 4 * script_.size();
    const std::int32_t table[] = {1, size, 0, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0,
                                  1, with, 1, 0, with, 1, 2, 1, 1, 2, 0, 2, 1, 0};
    const std::uint64_t ranges[] = {0, nbytes, 0, nbytes, 0, nbytes}, scratch[] = {nbytes};
    const net::Plan plan(table, ranges, scratch, {DType::float32, Op::sum, 1, false, {}}, {});
    const Wait wait(*mesh_);
    const Buffer source(nbytes);
    Buffer target(nbytes);
    sequence_ += script_.below(2);
    for (std::size_t rest = nbytes; script_.one_in(2) && rest > 0; rest -= std::min<std::size_t>(rest, piece)) {
        voice_of(with).say(script_, {.kind = FrameKind::data, .sequence = sequence_, .fingerprint = 1},
                           Buffer(std::min<std::size_t>(rest, piece)));
    }
    net::execute(*group_, plan, {source.data(), target.data(), false, sequence_, 1}, wait.options);
}

void Job::begin_split() {
    if (split_ != nullptr) {
        return;
    }
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    std::rotate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(script_.below(size)), all.end());
    if (script_.one_in(2)) {
        std::erase(all, peer());
    }
    child_.reset();
    split_ = std::make_unique<net::Split>(group_, all, 5);
}

void Job::end_split() {
    if (split_ == nullptr) {
        return;
    }
    const Wait wait(*mesh_);
    if (!split_->wait(wait.options).failed()) {
        child_ = split_->group();
    }
    split_->absent();
    if (script_.one_in(2)) {
        split_.reset();
    }
}

void Job::differ() {
    const Wait wait(*mesh_);
    std::vector<std::string> descriptors;
    group().exchange_descriptors(sequence_, script_.bytes(script_.size()), wait.options, descriptors);
}

// Looks at everything that others may have set, as errors do.
void Job::poll_all() {
    Group& with = group();
    for (int rank = 0; rank < with.size(); ++rank) {
        with.last_call(rank);
        with.leave_reason_of(rank);
        with.flaw_of(rank);
        with.messages().unexpected_tags(rank);
    }
    for (int rank = 0; rank < size; ++rank) {
        mesh_->report_of(rank);
        for (const std::vector<int>& members : mesh_->invitations_of(rank)) {
            for (const int member : members) {
                mesh_->report_of(member);
            }
        }
    }
    with.group_error(sequence_);
    with.poll_all();
    if (script_.one_in(8)) {
        with.announce_closing();
    }
}

// Asks all what they do; they answer at once, for the rank would wait for them.
void Job::ask_round() {
    if (!std::all_of(voices_.begin(), voices_.end(), [](const auto& one) { return one->is_in_step(); })) {
        return;
    }
    std::uint64_t number;
    {
        const net::Lock guard = mesh_->lock();
        number = mesh_->new_number() + 1;
    }
    for (auto& one : voices_) {
        net::RankStatus rank_status;
        rank_status.poll = number;
        rank_status.sequence = script_.number();
        rank_status.kind = static_cast<std::uint32_t>(script_.number());
        rank_status.is_inside = static_cast<std::uint32_t>(script_.below(2));
        rank_status.waiting_for = static_cast<std::int32_t>(script_.number());
        rank_status.sending_to = static_cast<std::int32_t>(script_.number());
        Buffer payload(sizeof rank_status + 8 * size + script_.below(9));
        std::memcpy(payload.data(), &rank_status, sizeof rank_status);
        one->say({.kind = FrameKind::rank_status}, payload);
    }
    const std::vector<int> found = script_.one_in(2) ? group_->missing() : group_->find_send_cycle(peer());
    for (const int rank : found) {
        if (rank < 0 || rank >= size) {
            std::abort();  // an error that names it would name a rank that is not there
        }
    }
}

void Job::end_group() {
    if (script_.one_in(4)) {
        voice().end_speech();
    } else if (script_.one_in(4)) {
        voice().hang_up();
    } else if (child_ != nullptr && script_.one_in(2)) {
        child_->leave("over", sequence_);
        child_.reset();
    } else if (rank_ == 0 && script_.one_in(8)) {  // it keeps them itself
        group_->set_error(sequence_ + 3, "enough");
    }
}

// -- what the others say ---------------------------------------------------------------------------

// A number that means something to the rank, or may.
std::uint64_t Job::number() {
    if (!sent_.empty() && script_.one_in(2)) {
        return sent().request.number;
    }
    return script_.one_in(2) ? sequence_ + script_.below(2) : script_.number();
}

Voice& Job::voice() { return *voices_[script_.below(voices_.size())]; }

void Job::say_frame() {
    net::Header header;
    header.kind = static_cast<FrameKind>(script_.below(static_cast<std::size_t>(FrameKind::last) + 2));
    header.group = script_.one_in(3) ? 5 : script_.one_in(16) ? script_.number() : 0;
    header.tag = tag();
    header.sequence = number();
    header.fingerprint = header.kind == FrameKind::rts && script_.one_in(2) ? large : script_.number();
    Voice& one = voice();
    one.say(script_, header, payload_of(header.kind));
}

Buffer Job::payload_of(FrameKind kind) {
    if (kind == FrameKind::join || kind == FrameKind::ring) {
        return script_.one_in(4) ? script_.bytes(script_.size()) : members();
    }
    if (kind == FrameKind::eager && !script_.one_in(4)) {  // a message with a header, or a part of one
        Buffer payload{static_cast<std::byte>(script_.below(12)), std::byte{0}};
        const Buffer rest = script_.bytes(script_.size());
        payload.insert(payload.end(), rest.begin(), rest.end());
        return payload;
    }
    if (kind == FrameKind::data || kind == FrameKind::bulk) {
        return Buffer(std::min<std::size_t>(script_.size(), piece), std::byte{7});
    }
    const bool has_none = net::longest_payload(kind, piece) == 0;
    return has_none && !script_.one_in(16) ? Buffer{} : script_.bytes(script_.size());
}

Buffer Job::members() {
    std::vector<std::int32_t> list(script_.below(5));
    for (std::int32_t& one : list) {
        one = script_.one_in(8) ? static_cast<std::int32_t>(script_.number()) : static_cast<std::int32_t>(script_.below(3));
    }
    const net::Bytes bytes = std::as_bytes(std::span(list));
    return {bytes.begin(), bytes.end()};
}

}  // namespace ferrodist::fuzz
