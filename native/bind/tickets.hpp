// SPDX-License-Identifier: MIT OR Apache-2.0
// Tickets: the order of the calls of a group, whichever threads make them.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

#include "bind/gil.hpp"
#include "core/process.hpp"

namespace ferrodist::bind {

// Numbers calls from 1; a call runs when all before it have ended. Any thread, with or without the GIL.
class Tickets {
public:
    std::uint64_t take() {
        const std::lock_guard guard(mutex_);
        return ++last_;
    }

    // Takes the next number if nobody has one: such a call runs at once. Else 0.
    std::uint64_t try_take() {
        const std::lock_guard guard(mutex_);
        return last_ == ended_ ? ++last_ : 0;
    }

    // Ends a call, also one that never ran.
    void end(std::uint64_t number) {
        const std::lock_guard guard(mutex_);
        if (number == ended_ + 1 && ended_early_.empty()) {
            ended_ = number;
        } else {
            ended_early_.insert(number);
            while (ended_early_.erase(ended_ + 1) == 1) {
                ++ended_;
            }
        }
        if (num_waiters_ > 0) {
            changed_.notify_all();
        }
    }

    // Waits until all calls before `number` have ended, or for a while; tells whether they have.
    bool wait(std::uint64_t number, std::chrono::nanoseconds longest) {
        std::unique_lock lock(mutex_);
        if (ended_ + 1 >= number) {
            return true;
        }
        ++num_waiters_;
        const bool is_next = changed_.wait_for(lock, longest, [&] { return ended_ + 1 >= number; });
        --num_waiters_;
        return is_next;
    }

    std::uint64_t last() const {
        const std::lock_guard guard(mutex_);
        return last_;
    }
    std::uint64_t ended() const {
        const std::lock_guard guard(mutex_);
        return ended_;
    }

private:
    mutable std::mutex mutex_;
    std::condition_variable& changed_ = *new std::condition_variable;  // a forked child must not destroy it
    std::uint64_t last_ = 0, ended_ = 0;
    std::set<std::uint64_t> ended_early_;
    int num_waiters_ = 0;
};

// The tickets of a group; call once per module.
inline void add_tickets(nanobind::module_& module) {
    using namespace nanobind::literals;
    nanobind::class_<Tickets>(module, "Tickets", "Numbers calls from 1; each runs when all before it have ended.")
        .def(nanobind::init<>())
        .def("take", &Tickets::take, "Draw the next number.")
        .def("wait", [](Tickets& self, std::uint64_t number, const nanobind::callable& poll) {
            core::HeldThread held;
            while (self.ended() + 1 < number) {
                held.note();
                const nanobind::object seconds = nanobind::steal(call_python(poll.ptr()));
                const double longest = seconds.is_valid() ? nanobind::cast<double>(seconds) : throw nanobind::python_error();
                const WithoutGil unlocked;
                self.wait(number, std::chrono::nanoseconds(static_cast<std::int64_t>(longest * 1e9)));
            }
        }, "number"_a, "poll"_a, "Wait until all calls before have ended; poll() may raise, or says how long to sleep.")
        .def("end", &Tickets::end, "number"_a, "End a call, also one that never ran.")
        .def_prop_ro("is_idle", [](const Tickets& self) { return self.ended() == self.last(); },
                     "Whether no call runs, or waits to.")
        .def_prop_ro("last_ended", &Tickets::ended, "The number of the last call that ended with all before it.");
}

}  // namespace ferrodist::bind
