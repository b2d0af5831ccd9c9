// SPDX-License-Identifier: MIT OR Apache-2.0
// How a call ended.
#pragma once

namespace ferrodist::core {

enum class StatusCode : int {
    done,
    mismatch,     // the ranks called different things
    group_error,  // somebody set a group error that concerns this call
    late,         // the deadline has passed
    lost,         // the failed rank has left or died without doing its part
    no_heartbeat, // the failed rank shows no heartbeat
    interrupted,  // the caller's hook asked to stop
    corrupt,      // the failed rank posted what cannot be right
    unexpected,   // a message is not what its receiver expects
    given_up,     // there was a group error before the call began, or this rank has left
    no_memory,    // there was none for what the call needs besides its arrays
    other_kind,   // the next message is an object where an array is received, or the other way round; it stays
    cancelled,    // a receive was withdrawn by who posted it
};

// How a call ended, and because of whom.
struct Status {
    StatusCode code = StatusCode::done;
    int failed_rank = -1;

    bool failed() const { return code != StatusCode::done; }
};

}  // namespace ferrodist::core
