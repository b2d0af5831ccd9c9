// SPDX-License-Identifier: MIT OR Apache-2.0
// TurnCounter: the order of the calls of a group. Touched only with the GIL.
#pragma once

#include <cstdint>
#include <set>

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

}  // namespace ferrodist::bind
