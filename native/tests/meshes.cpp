// SPDX-License-Identifier: MIT OR Apache-2.0
#include "meshes.hpp"

#include <algorithm>
#include <numeric>

#include "check.hpp"

namespace ferrodist::tests {
namespace {

bool has(const std::vector<int>& list, int number) {
    return std::find(list.begin(), list.end(), number) != list.end();
}

}  // namespace

// -- strangers ------------------------------------------------------------------------------------

void Stranger::say(net::Header header, const Buffer& payload) {
    link.send_copy(header, payload, false);
    CHECK(eventually([&] {
        link.set_writable();
        link.flush();
        listen();  // or the other side may not go on
        return link.is_idle();
    }));
}

Frame Stranger::hear(net::FrameKind kind) {
    auto found = heard_.frames.end();
    CHECK(eventually([&] {
        listen();
        found = std::find_if(heard_.frames.begin(), heard_.frames.end(),
                             [&](const Frame& frame) { return frame.header.kind == kind; });
        return found != heard_.frames.end() || !link.is_up();
    }));
    if (found == heard_.frames.end()) {
        fail(__FILE__, __LINE__, "a stranger's link is down: " + link.flaw());
        return {};
    }
    Frame frame = std::move(*found);
    heard_.frames.erase(found);
    return frame;
}

std::size_t Stranger::num_heard(net::FrameKind kind) const {
    const auto& frames = heard_.frames;
    return static_cast<std::size_t>(
        std::count_if(frames.begin(), frames.end(), [&](const Frame& frame) { return frame.header.kind == kind; }));
}

// -- meshes ---------------------------------------------------------------------------------------

Meshes::Meshes(int size, const MeshSetup& setup) : ranks_(static_cast<std::size_t>(size)) {
    std::vector<std::vector<int>> sockets(ranks_.size(), std::vector<int>(ranks_.size(), -1));
    for (std::size_t one = 0; one < ranks_.size(); ++one) {
        for (std::size_t two = one + 1; two < ranks_.size(); ++two) {
            const Ends ends = connect_ends();
            sockets[one][two] = ends.left;
            sockets[two][one] = ends.right;
        }
    }
    const net::MeshOptions options{20 * millisecond, setup.heartbeat_timeout_ns, setup.piece_nbytes};
    for (int rank = 0; rank < size; ++rank) {
        const std::vector<int>& own = sockets[static_cast<std::size_t>(rank)];
        if (has(setup.strangers, rank)) {
            for (int peer = 0; peer < size; ++peer) {
                at(rank).strangers.push_back(
                    std::make_unique<Stranger>(own[static_cast<std::size_t>(peer)], rank, peer, setup.piece_nbytes));
            }
            continue;
        }
        std::vector<net::LinkSpec> specs;
        for (int peer = 0; peer < size; ++peer) {
            specs.push_back({own[static_cast<std::size_t>(peer)], session_of(rank, peer)});
        }
        at(rank).mesh = std::make_shared<net::Mesh>(rank, specs, options);
        std::vector<int> members(ranks_.size());
        std::iota(members.begin(), members.end(), 0);
        {
            const net::Lock guard = mesh(rank).lock();
            at(rank).group = std::make_shared<net::Group>(at(rank).mesh, 0, members, nullptr);
        }
        if (!has(setup.asleep, rank)) {
            mesh(rank).start();
        }
    }
}

Meshes::~Meshes() {
    for (int rank = 0; rank < size(); ++rank) {
        kill(rank);
    }
}

void Meshes::kill(int rank) {
    at(rank).group.reset();
    at(rank).mesh.reset();
    at(rank).strangers.clear();
}

void Meshes::run(const std::function<void(net::Group&)>& work) {
    run_threads(size(), [&](int rank) {
        if (at(rank).group != nullptr) {
            work(group(rank));
        }
    });
}

// -- calls ----------------------------------------------------------------------------------------

net::Bytes bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

Buffer buffer_of(std::string_view text) {
    const net::Bytes bytes = bytes_of(text);
    return {bytes.begin(), bytes.end()};
}

std::string text_of(const Buffer& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

core::Status trade(net::Group& group, const Trade& what, std::int64_t timeout_ns) {
    const Wait wait(timeout_ns, group.mesh().spins());
    const net::Task task{nullptr, nullptr, false, what.sequence, what.fingerprint};
    return net::exchange(group, 1, what.to, what.out, what.from, what.in.data(), what.in.size(), task, wait.options);
}

core::Status trade_in_vain(net::Group& group, const Trade& what, int num_polls) {
    ActingHook hook([&] { return --num_polls > 0; });
    const core::WaitOptions options{&hook, 0, core::no_spins};
    const net::Task task{nullptr, nullptr, false, what.sequence, what.fingerprint};
    return net::exchange(group, 1, what.to, what.out, what.from, what.in.data(), what.in.size(), task, options);
}

core::Status go_round(net::Group& group, std::uint64_t sequence, std::size_t nbytes, std::int64_t timeout_ns) {
    const int size = group.size(), right = (group.rank() + 1) % size, left = (group.rank() + size - 1) % size;
    for (int step = 0; step < size; ++step) {
        const auto seed = [&](int rank) { return sequence * 1000 + static_cast<std::uint64_t>(100 * step + rank); };
        const Buffer out = random_bytes(nbytes, seed(group.rank()));
        Buffer in(nbytes);
        const core::Status status = trade(group, {sequence, right, out, left, in}, timeout_ns);
        if (status.failed()) {
            return status;
        }
        CHECK(in == random_bytes(nbytes, seed(left)));
    }
    return {};
}

}  // namespace ferrodist::tests
