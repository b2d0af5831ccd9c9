// SPDX-License-Identifier: MIT OR Apache-2.0
// Script: the bytes of a fuzzer, read as decisions. Voice: a rank that knows the key of its connection and says what
// a script tells it to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "core/noncopyable.hpp"
#include "net/frame.hpp"

namespace ferrodist::fuzz {

using Buffer = std::vector<std::byte>;

// The end of a script reads as zeros.
class Script {
public:
    explicit Script(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    bool is_at_end() const { return at_ >= bytes_.size(); }
    std::uint8_t byte() { return is_at_end() ? 0 : bytes_[at_++]; }
    std::size_t below(std::size_t limit) { return byte() % limit; }
    // True once in so many times.
    bool one_in(std::size_t times) { return below(times) == times - 1; }

    // Mostly a small number, so that those of different frames meet; now and then one at a limit.
    std::uint64_t number() {
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        constexpr std::uint64_t limits[] = {most, most - 1, most / 2, most / 2 + 1, 0x7fffffff, 0x80000000, 0xffffffff};
        if (!one_in(8)) {
            return below(6);
        }
        return limits[below(std::size(limits))] - below(2);
    }

    // The size of something: nothing, little, or about what some limit is.
    std::size_t size() {
        constexpr std::size_t limits[] = {40, 72, 128, 1024, 4096, 8192, 65536};
        return one_in(3) ? limits[below(std::size(limits))] + below(3) - 1 : below(32);
    }

    Buffer bytes(std::size_t count) {
        Buffer found(count);
        for (std::byte& one : found) {
            one = static_cast<std::byte>(is_at_end() ? found.size() : byte());
        }
        return found;
    }

private:
    std::span<const std::uint8_t> bytes_;
    std::size_t at_ = 0;
};

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
