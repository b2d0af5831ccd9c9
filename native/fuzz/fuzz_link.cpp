// SPDX-License-Identifier: MIT OR Apache-2.0
// Fuzzes what a rank does with what others send it, and plans. Nothing may crash, hang, or touch memory
// that is not there any more.
#include <sys/socket.h>

#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "fuzz/job.hpp"
#include "net/plan.hpp"

namespace ferrodist::fuzz {

Job::Job(Script& script) : script_(script), rank_(static_cast<int>(script.below(size))) {
    std::vector<net::LinkSpec> specs;
    for (int peer = 0; peer < size; ++peer) {
        specs.push_back({-1, Buffer(net::FrameKey::session_nbytes, static_cast<std::byte>(peer))});
    }
    for (int i = 1; i < size; ++i) {  // in the order of peer()
        const auto peer = static_cast<std::uint32_t>((rank_ + i) % size);
        int ends[2] = {-1, -1};
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
            std::abort();
        }
        specs[peer].socket = ends[0];
        voices_.push_back(std::make_unique<Voice>(ends[1], specs[peer].session, peer, [this] { read_all(); }));
    }
    constexpr std::int64_t for_ever = 1'000'000'000'000;
    mesh_ = std::make_shared<net::Mesh>(rank_, specs, net::MeshOptions{for_ever, for_ever, piece, 10'000});
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), 0);
    const net::Lock guard = mesh_->lock();
    group_ = std::make_shared<net::Group>(mesh_, 0, members, nullptr);
    for (const int peer : members) {
        constexpr int little = 1;  // of what goes out, so that much of it waits
        ::setsockopt(mesh_->link(peer).socket(), SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    }
}

Job::~Job() {
    for (Sent& one : sent_) {
        group_->messages().abandon(one.request, {core::StatusCode::given_up});
    }
    split_.reset();
    if (script_.one_in(4)) {
        voices_.clear();  // before the rank, or after it
    }
}

void Job::step() {
    switch (script_.below(28)) {
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
            return send_message();
        case 14:
            return wait_for_message();
        case 15:
            return receive_message(peer(), tag(), script_.one_in(4) ? large : script_.size());
        case 16:
        case 23:
            return receive_rts();
        case 24:
        case 25:
            return answer_rts();
        case 26:
            return execute();
        case 17:
            return begin_split();
        case 18:
            return end_split();
        case 19:
            return differ();
        case 20:
            return poll_all();
        case 21:
            return ask_round();
        case 22:
            return voice().listen();
        default:
            return end_group();
    }
}

namespace {

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
    const net::Reduction reduction{DType::float32, Op::sum, 1, script.one_in(2),
                                   script.one_in(2) ? std::optional(Op::mean) : std::nullopt};
    try {
        const net::Plan plan(table, ranges, scratch, reduction, peers);
        for (const net::Instruction& instruction : plan.instructions()) {
            if (instruction.send_to >= plan.num_ranks() || instruction.recv_from >= plan.num_ranks()) {
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
