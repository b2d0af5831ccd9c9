// SPDX-License-Identifier: MIT OR Apache-2.0
// Job: one rank that is real, and does by turns what programs do: exchanges, messages, splits. Two
// others speak from the script: frames that are signed as they should be and say anything, frames that
// are not right, and plain noise.
#pragma once

#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <vector>

#include "fuzz/voice.hpp"
#include "net/group.hpp"
#include "net/split.hpp"

namespace ferrodist::fuzz {

constexpr int size = 3;
constexpr std::uint64_t piece = 4096;
constexpr std::size_t large = core::eager_limit + 1;

// A large message on its way, and its memory.
struct Sent {
    Buffer content;
    core::Request request = {};
};

class Job : core::NonCopyable {
public:
    explicit Job(Script& script);
    ~Job();

    void step();

private:
    // What the others say.
    std::uint64_t number();
    Voice& voice();
    void say_frame();
    Buffer payload_of(net::FrameKind kind);
    Buffer members();
    // What the rank does.
    void read_all();
    void exchange();
    void send_message();
    void wait_for_message();
    void answer_rts();
    void receive_message(int from, std::uint32_t tag, std::size_t nbytes);
    void receive_rts();
    void execute();
    void begin_split();
    void end_split();
    void differ();
    void poll_all();
    void ask_round();
    void end_group();
    // The voice of a rank.
    Voice& voice_of(int rank) { return *voices_[static_cast<std::size_t>((rank - rank_ - 1 + size) % size)]; }
    Sent& sent() { return *std::next(sent_.begin(), static_cast<std::ptrdiff_t>(script_.below(sent_.size()))); }
    std::uint32_t tag() { return static_cast<std::uint32_t>(script_.one_in(8) ? script_.number() : script_.below(2)); }
    int peer() { return (rank_ + 1 + static_cast<int>(script_.below(size - 1))) % size; }
    net::Group& group() { return child_ != nullptr && script_.one_in(3) ? *child_ : *group_; }

    Script& script_;
    const int rank_;
    std::shared_ptr<net::Mesh> mesh_;
    std::shared_ptr<net::Group> group_, child_;
    std::vector<std::unique_ptr<Voice>> voices_;
    std::list<Sent> sent_;
    std::unique_ptr<net::Split> split_;
    std::uint64_t sequence_ = 1;
};

}  // namespace ferrodist::fuzz
