// SPDX-License-Identifier: MIT OR Apache-2.0
// SharedGroup: a group as Python sees it, and the order of its calls. Touched only with the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "shm/group.hpp"
#include "shm/messages.hpp"

namespace ferrodist::bind {

// Numbers calls from 1; a call's turn comes when all before it have ended.
class TurnCounter {
public:
    std::uint64_t take() { return ++last_; }
    void end(std::uint64_t number) {
        if (number == ended_ + 1 && ended_early_.empty()) {
            ended_ = number;
            return;
        }
        ended_early_.insert(number);
        while (ended_early_.erase(ended_ + 1) == 1) {
            ++ended_;
        }
    }

    std::uint64_t last() const { return last_; }
    std::uint64_t ended() const { return ended_; }
    bool is_idle() const { return last_ == ended_; }

private:
    std::uint64_t last_ = 0, ended_ = 0;
    std::set<std::uint64_t> ended_early_;
};

struct SharedGroup {
    explicit SharedGroup(std::shared_ptr<shm::Group> native)
        : group(std::move(native)), messages(*group) {}

    std::shared_ptr<shm::Group> group;
    shm::Messages messages;
    TurnCounter turns;
    bool is_open = true;        // takes calls
    bool reproducible = false;  // part of the fingerprint
    std::int64_t timeout_ns = 0;
    int num_in_line = 0;  // receives that wait for their turn, or have it
};

}  // namespace ferrodist::bind
