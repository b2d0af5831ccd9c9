// SPDX-License-Identifier: MIT OR Apache-2.0
// Fuzzes what a rank does with what others send it. One rank is real, and does by turns what programs
// do: exchanges, messages, splits. Two others speak from the script: frames that are signed as they
// should be and say anything, frames that are not right, and plain noise. Nothing may crash, hang, or
// touch memory that is not there any more.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <numeric>
#include <optional>

#include "fuzz/voice.hpp"
#include "net/group.hpp"
#include "net/plan.hpp"
#include "net/split.hpp"
#include "net/walker.hpp"

namespace ferrodist::fuzz {
namespace {

using net::FrameKind;
using net::Group;
using shm::Ending;

constexpr int size = 3;
constexpr std::uint64_t piece = 4096;
constexpr std::int64_t moment = 40'000;  // nanoseconds
constexpr std::size_t large = net::Letters::largest_whole + 1;

// A wait that is over at once.
class Wait {
public:
    Wait() : patience{&watch_, shm::now_ns() + moment, {0, 2 * moment, 100}} {}

private:
    shm::Watch watch_;

public:
    const shm::Patience patience;
};

// A large message on its way, and its memory.
struct Sent {
    Buffer content;
    std::shared_ptr<net::Letter> letter;
};

class Job {
public:
    explicit Job(Script& script);
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    void step();

private:
    // What the others say.
    Voice& voice();
    void say_frame();
    Buffer payload_of(FrameKind kind);
    Buffer members();
    // What the rank does.
    void read_all();
    void exchange();
    void send_letter();
    void settle_letter();
    void receive_letter();
    void begin_split();
    void end_split();
    void differ();
    void look_round();
    void ask_round();
    void end_group();
    int peer() { return (rank_ + 1 + static_cast<int>(script_.below(size - 1))) % size; }
    Group& group() { return child_ != nullptr && script_.one_in(3) ? *child_ : *group_; }

    Script& script_;
    const int rank_;
    std::shared_ptr<net::Mesh> mesh_;
    std::shared_ptr<Group> group_, child_;
    std::vector<std::unique_ptr<Voice>> voices_;
    std::list<Sent> sent_;
    std::unique_ptr<net::Split> split_;
    std::uint64_t sequence_ = 0;
};

Job::Job(Script& script) : script_(script), rank_(static_cast<int>(script.below(size))) {
    std::vector<net::LinkSpec> specs;
    for (int peer = 0; peer < size; ++peer) {
        int ends[2] = {-1, -1};
        const Buffer session(net::FrameKey::session_nbytes, static_cast<std::byte>(peer));
        if (peer != rank_) {
            if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
                std::abort();
            }
            voices_.push_back(std::make_unique<Voice>(ends[1], session, static_cast<std::uint32_t>(peer),
                                                      [this] { read_all(); }));
        }
        specs.push_back({ends[0], session});
    }
    constexpr std::int64_t for_ever = 1'000'000'000'000;
    mesh_ = std::make_shared<net::Mesh>(rank_, specs, net::MeshOptions{for_ever, for_ever, piece});
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), 0);
    const net::Lock guard = mesh_->lock();
    group_ = std::make_shared<Group>(mesh_, 0, members, nullptr);
}

Job::~Job() {
    for (Sent& one : sent_) {
        group_->letters().abandon(*one.letter);
    }
    split_.reset();
    if (script_.one_in(4)) {
        voices_.clear();  // before the rank, or after it
    }
}

void Job::step() {
    switch (script_.below(24)) {
        case 0:
        case 1:
        case 2:
        case 3:
        case 4:
        case 5:
        case 6:
            return say_frame();
        case 7:
            return script_.one_in(16) ? voice().babble(script_.bytes(script_.size())) : voice().go_on();
        case 8:
        case 9:
            return read_all();
        case 10:
        case 11:
            return exchange();
        case 12:
        case 13:
            return send_letter();
        case 14:
            return settle_letter();
        case 15:
        case 16:
            return receive_letter();
        case 17:
            return begin_split();
        case 18:
            return end_split();
        case 19:
            return differ();
        case 20:
            return look_round();
        case 21:
            return ask_round();
        case 22:
            return voice().listen();
        default:
            return end_group();
    }
}

// -- what the others say ----------------------------------------------------------------------------

Voice& Job::voice() { return *voices_[script_.below(voices_.size())]; }

void Job::say_frame() {
    net::Header header;
    header.kind = static_cast<FrameKind>(script_.below(static_cast<std::size_t>(FrameKind::last) + 2));
    header.group = script_.one_in(3) ? 5 : script_.one_in(16) ? script_.number() : 0;
    header.tag = static_cast<std::uint32_t>(script_.number());
    header.sequence = script_.one_in(2) ? sequence_ + script_.below(2) : script_.number();
    header.fingerprint = header.kind == FrameKind::offer && script_.one_in(2) ? large : script_.number();
    Voice& one = voice();
    one.say(script_, header, payload_of(header.kind));
}

Buffer Job::payload_of(FrameKind kind) {
    if (kind == FrameKind::join || kind == FrameKind::ring) {
        return script_.one_in(4) ? script_.bytes(script_.size()) : members();
    }
    if (kind == FrameKind::letter && !script_.one_in(4)) {  // a message with a header, or a part of one
        Buffer payload{static_cast<std::byte>(script_.below(12)), std::byte{0}};
        const Buffer rest = script_.bytes(script_.size());
        payload.insert(payload.end(), rest.begin(), rest.end());
        return payload;
    }
    if (kind == FrameKind::data || kind == FrameKind::content) {
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

// -- what the rank does -----------------------------------------------------------------------------

void Job::read_all() {
    net::Lock guard = mesh_->lock();
    const Wait wait;
    net::Waiter waiter(*mesh_, guard, wait.patience);
    while (!waiter.until_change(mesh_->tick()).failed()) {
    }
}

void Job::exchange() {
    const Wait wait;
    sequence_ += script_.below(2);
    const Buffer out(script_.size() % piece);
    Buffer in(script_.size() % piece);
    const int to = script_.one_in(3) ? -1 : peer(), from = script_.one_in(3) ? -1 : peer();
    Group& with = group();
    const auto rank = [&](int one) { return one < with.size() && one != with.rank() ? one : -1; };
    const net::Task task{nullptr, nullptr, false, sequence_, script_.below(3)};
    net::exchange(with, 1, rank(to), out, rank(from), in.data(), in.size(), task, wait.patience);
}

void Job::send_letter() {
    Buffer content = script_.one_in(2) ? Buffer(large + script_.size()) : script_.bytes(script_.size());
    const Buffer header = script_.bytes(script_.below(12));
    sent_.push_back({std::move(content), nullptr});
    Sent& one = sent_.back();
    one.letter = group_->letters().post(peer(), static_cast<std::uint32_t>(script_.number()), header, one.content);
    if (one.letter == nullptr) {
        sent_.pop_back();
    }
}

void Job::settle_letter() {
    if (sent_.empty()) {
        return;
    }
    const auto one = std::next(sent_.begin(), static_cast<std::ptrdiff_t>(script_.below(sent_.size())));
    const Wait wait;
    const Ending ending = group_->letters().settle(*one->letter, script_.one_in(2), wait.patience);
    if (ending.failed() && script_.one_in(2)) {
        return;
    }
    if (ending.failed() && !group_->letters().take_back(*one->letter)) {
        group_->letters().abandon(*one->letter);
    }
    sent_.erase(one);
}

void Job::receive_letter() {
    const Wait wait;
    Buffer target(script_.one_in(2) ? large : script_.size()), found;
    const Buffer header = script_.bytes(script_.below(2) * script_.below(12));
    group_->letters().receive(peer(), static_cast<std::uint32_t>(script_.number()), header, target.data(),
                              target.size(), wait.patience, found);
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
    const Wait wait;
    if (!split_->wait(wait.patience).failed()) {
        child_ = split_->group();
    }
    split_->absent();
    if (script_.one_in(2)) {
        split_.reset();
    }
}

void Job::differ() {
    const Wait wait;
    std::vector<std::string> statements;
    group().hear_all(sequence_, script_.bytes(script_.size()), wait.patience, statements);
}

// Looks at everything that others may have set, as errors do.
void Job::look_round() {
    Group& with = group();
    for (int rank = 0; rank < with.size(); ++rank) {
        with.last_call(rank);
        with.departure_of(rank);
        with.flaw_of(rank);
        with.letters().waiting_tags(rank);
    }
    for (int rank = 0; rank < size; ++rank) {
        mesh_->report_of(rank);
        for (const std::vector<int>& members : mesh_->invitations_of(rank)) {
            for (const int member : members) {
                mesh_->report_of(member);
            }
        }
    }
    with.verdict(sequence_);
    with.look_round();
    if (script_.one_in(8)) {
        with.announce_closing();
    }
    with.line_up(1);
    with.line_up(-1);
}

// Asks all what they do; they answer at once, or the rank would wait for them.
void Job::ask_round() {
    std::uint64_t number;
    {
        const net::Lock guard = mesh_->lock();
        number = mesh_->new_number() + 1;
    }
    for (auto& one : voices_) {
        net::Desk desk;
        desk.poll = number;
        desk.sequence = script_.number();
        desk.kind = static_cast<std::uint32_t>(script_.number());
        desk.is_inside = static_cast<std::uint32_t>(script_.below(2));
        desk.waiting_for = static_cast<std::int32_t>(script_.number());
        desk.sending_to = static_cast<std::int32_t>(script_.number());
        Buffer payload(sizeof desk + 8 * size + script_.below(9));
        std::memcpy(payload.data(), &desk, sizeof desk);
        one->say({.kind = FrameKind::desk}, payload);
    }
    const std::vector<int> found = script_.one_in(2) ? group_->missing() : group_->find_ring(peer());
    for (const int rank : found) {
        if (rank < 0 || rank >= size) {
            std::abort();  // whoever names it would look for a rank that is not there
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
    } else if (script_.one_in(8)) {
        group_->give_verdict(sequence_ + 3, "enough");
    }
}

// -- plans ------------------------------------------------------------------------------------------

// The integers of a plan come from Python; none of them may be believed either.
void make_plan(Script& script) {
    std::vector<std::int32_t> table;
    std::vector<std::uint64_t> ranges, scratch(script.below(3));
    while (!script.is_at_end() && table.size() < 200) {
        table.push_back(static_cast<std::int32_t>(script.one_in(8) ? script.number() : script.below(4)));
        if (script.one_in(2)) {
            ranges.push_back(script.number());
        }
    }
    std::iota(scratch.begin(), scratch.end(), script.number());
    const std::vector<int> peers(script.below(4), static_cast<int>(script.below(4)));
    const net::Folding folding{DType::float32, Op::sum, 1, script.one_in(2), script.one_in(2)};
    try {
        const net::Plan plan(table, ranges, scratch, folding, peers);
        for (const net::Row& row : plan.rows()) {
            if (row.send_to >= plan.num_ranks() || row.recv_from >= plan.num_ranks()) {
                std::abort();
            }
        }
    } catch (const std::invalid_argument&) {
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
    Script script({data, nbytes});
    if (script.one_in(16)) {
        make_plan(script);
        return 0;
    }
    Job job(script);
    while (!script.is_at_end()) {
        job.step();
    }
    return 0;
}

}  // namespace ferrodist::fuzz
