// SPDX-License-Identifier: MIT OR Apache-2.0
// Connections for tests of links: pairs of sockets, frames that are written down, and a wire between
// two links that carries bytes in portions of any size, and may harm them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "net/link.hpp"

namespace ferrodist::net {

std::ostream& operator<<(std::ostream& stream, Link::State state);
std::ostream& operator<<(std::ostream& stream, FrameKind kind);

}  // namespace ferrodist::net

namespace ferrodist::tests {

using Buffer = std::vector<std::byte>;

// Bytes that are the same for one seed.
Buffer random_bytes(std::size_t size, std::uint64_t seed);

// A key for the connection of two ranks.
Buffer session_of(int one, int other);

// Two connected sockets that never block. Who takes an end closes it.
struct Ends {
    int left, right;
};
Ends connect_ends();

// Lets the kernel hold only little of what a socket has sent.
void shrink_buffers(int socket);

struct Frame {
    net::Header header;
    Buffer payload;
    bool is_void, was_placed;
};

// Writes down all frames, and says where payloads go.
class Collector : public net::FrameHandler {
public:
    std::byte* place_for(int peer, const net::Header& header) override;
    void on_frame(int peer, const net::Header& header, net::Payload payload, bool is_void) override;

    std::vector<Frame> frames;
    std::vector<std::uint64_t> asked;  // the lengths of payloads that a place was asked for
    std::function<std::byte*(const net::Header&)> place = [](const net::Header&) { return nullptr; };

private:
    std::byte* last_place_ = nullptr;
};

// Two links, of ranks 0 and 1, and the wire between them.
class Wire {
public:
    static constexpr std::uint64_t piece = 300'000;

    explicit Wire(std::uint64_t seed = 1);
    ~Wire();
    Wire(const Wire&) = delete;
    Wire& operator=(const Wire&) = delete;

    net::Link one, two;
    Collector heard_by_one, heard_by_two;
    std::function<void(Buffer&)> harm = [](Buffer&) {};  // what happens to a portion on its way to two

    // Carries a portion each way, and lets both links go on.
    void carry(std::size_t most = 100'000);
    // Goes on until all that both have sent has arrived, or a link is down.
    void carry_all();
    // Ends the connection: two hears it after what is on its way.
    void hang_up_one();

private:
    void move(int from, int to, Buffer& waiting, bool is_harmed, std::size_t most);

    Wire(Ends first, Ends second, std::uint64_t seed);
    int near_one_, near_two_;
    Buffer to_two_, to_one_;
    std::mt19937_64 random_;
};

// Queues a frame with a copy of its payload.
void send(net::Link& link, const Buffer& payload, std::uint64_t sequence = 0, bool is_urgent = false,
          net::FrameKind kind = net::FrameKind::data);

// The bytes of a whole frame.
Buffer frame_bytes(net::Header header, const Buffer& payload, const net::FrameKey& key);

}  // namespace ferrodist::tests
