// SPDX-License-Identifier: MIT OR Apache-2.0
// Ranks as threads, each with a mesh of its own, connected by pairs of sockets. A stranger is a rank
// without a mesh: a test speaks for it, frame by frame.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "net/group.hpp"
#include "net/plan.hpp"
#include "ranks.hpp"
#include "wires.hpp"

namespace ferrodist::tests {

struct MeshSetup {
    std::int64_t heartbeat_timeout_ns = very_long;
    std::uint64_t piece_nbytes = 64 * 1024;
    std::vector<int> asleep = {};     // nothing reads for these ranks while they do not call
    std::vector<int> strangers = {};  // these have no mesh
};

// A rank that a test speaks for, as seen by another.
class Stranger {
public:
    Stranger(int socket, int rank, int peer, std::uint64_t piece)
        : link(socket, session_of(rank, peer), static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(peer),
               piece) {}

    // Sends a frame of the first group.
    void say(net::Header header, const Buffer& payload = {});
    // Waits for a frame of this kind and takes it out of what was heard.
    Frame hear(net::FrameKind kind);
    std::size_t num_heard(net::FrameKind kind) const;
    // Takes what has come.
    void listen() { link.pump(heard_); }

    net::Link link;

private:
    Collector heard_;
};

class Meshes {
public:
    explicit Meshes(int size, const MeshSetup& setup = {});
    ~Meshes();
    Meshes(const Meshes&) = delete;
    Meshes& operator=(const Meshes&) = delete;

    int size() const { return static_cast<int>(ranks_.size()); }
    net::Mesh& mesh(int rank) { return *at(rank).mesh; }
    net::Group& group(int rank) { return *at(rank).group; }
    const std::shared_ptr<net::Group>& shared_group(int rank) { return at(rank).group; }
    Stranger& stranger(int rank, int peer) { return *at(rank).strangers[static_cast<std::size_t>(peer)]; }
    // `work` gets the group of its rank, in a thread of its own.
    void run(const std::function<void(net::Group&)>& work);
    // Ends the connections of a rank at once, as its death does.
    void kill(int rank);

private:
    struct Rank {
        std::shared_ptr<net::Mesh> mesh;
        std::shared_ptr<net::Group> group;
        std::vector<std::unique_ptr<Stranger>> strangers;  // what a stranger is to each rank
    };
    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    std::vector<Rank> ranks_;
};

net::Bytes bytes_of(std::string_view text);
Buffer buffer_of(std::string_view text);
std::string text_of(const Buffer& bytes);

// A wait of so long.
class Wait {
public:
    explicit Wait(std::int64_t timeout_ns = very_long, core::Spins* spins = core::no_spins)
        : options{&hook_, core::now_ns() + timeout_ns, spins} {}

private:
    core::ProgressHook hook_;

public:
    const core::WaitOptions options;
};

constexpr std::int64_t soon = 50 * millisecond;  // for a wait that is to end in vain

// What a rank does in one call of exchange().
struct Trade {
    std::uint64_t sequence;
    int to = -1;
    net::Bytes out = {};
    int from = -1;
    std::span<std::byte> in = {};
    std::uint64_t fingerprint = 1;
};
core::Status trade(net::Group& group, const Trade& what, std::int64_t timeout_ns = very_long);
// The same, but stops waiting after a while; nobody is barred by that.
core::Status trade_in_vain(net::Group& group, const Trade& what, int num_polls = 1);

// Every rank hears from both neighbours, so from all after as many calls as there are ranks.
core::Status go_round(net::Group& group, std::uint64_t sequence, std::size_t nbytes = 1000,
                     std::int64_t timeout_ns = very_long);

}  // namespace ferrodist::tests
