// SPDX-License-Identifier: MIT OR Apache-2.0
// Waiter: the waits of one call, in which it reads for everybody.
#pragma once

#include <cstdint>

#include "net/mesh.hpp"

namespace ferrodist::net {

// How long a question to other ranks may take: a wait that looks at nothing.
inline WaitOptions brief(std::int64_t ns) {
    static core::ProgressHook nobody;
    return {&nobody, core::now_ns() + ns, core::no_spins};
}

// The waits of one call: how long it has spun, when to look round, and when it is late.
class Waiter : core::NonCopyable {
public:
    Waiter(Mesh& mesh, Lock& lock, const WaitOptions& options);
    ~Waiter();

    // Waits until the epoch is another one, and looks round now and then. An ending is the caller's:
    // late or interrupted.
    Status until_change(std::uint64_t epoch);
    // What was awaited has come: the next wait begins.
    void progressed();
    // True about every 50 ms of waiting: time for what is too slow to be asked at every change.
    bool is_time_to_poll();
    const WaitOptions& options() const { return options_; }

private:
    Status poll();
    core::Spins::Step next_step(std::int64_t now);

    Mesh& mesh_;
    Lock& lock_;
    const WaitOptions& options_;
    std::int64_t start_ns_ = 0;  // of the wait for what is awaited now; 0: it has not begun
    std::int64_t next_poll_ns_ = 0;
    bool was_asked_ = false;
    bool has_polled_ = false;  // since something has come
};

}  // namespace ferrodist::net
