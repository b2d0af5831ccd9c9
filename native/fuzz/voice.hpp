// SPDX-License-Identifier: MIT OR Apache-2.0
// Voice: a rank that knows the key of its connection and says what a script tells it to.
#pragma once

#include <cstdint>
#include <functional>

#include "core/noncopyable.hpp"
#include "fuzz/script.hpp"
#include "net/frame.hpp"

namespace ferrodist::fuzz {

class Voice : core::NonCopyable {
public:
    // `make_room` is called when the kernel holds all it can.
    Voice(int socket, net::Bytes session, std::uint32_t rank, std::function<void()> make_room);
    ~Voice() { hang_up(); }

    // Says a frame; now and then not all of it, or one that is not right.
    void say(Script& script, net::Header header, const Buffer& payload);
    // Says a frame as it should be.
    void say(net::Header header, const Buffer& payload = {});
    // Says the rest of a frame of which a part was held back.
    void go_on();
    // Says bytes that are no frame.
    void babble(const Buffer& bytes) {
        is_in_step_ = false;
        write(bytes);
    }
    // Reads what has come, and forgets it.
    void listen();
    void end_speech();
    void hang_up();
    // Whether what is said next is heard as it is meant, or not at all.
    bool is_in_step() const { return is_in_step_; }

private:
    void write(const Buffer& bytes);
    Buffer encode(net::Header header, const Buffer& payload);

    int socket_;
    net::FrameKey key_;
    std::uint32_t rank_;
    std::uint64_t number_ = 0;
    Buffer held_back_;
    bool is_in_step_ = true;
    std::function<void()> make_room_;
};

}  // namespace ferrodist::fuzz
