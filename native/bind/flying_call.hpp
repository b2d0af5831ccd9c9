// SPDX-License-Identifier: MIT OR Apache-2.0
// FlyingCall: a collective call in flight, between its Work and the queue of its group.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "bind/gil.hpp"
#include "bind/progress.hpp"
#include "bind/tickets.hpp"
#include "bind/work.hpp"

namespace ferrodist::bind {

constexpr std::int64_t poll_ns = 50'000'000;

class FlyingCall : public CallInFlight, public WorkRequest {
public:
    FlyingCall(Tickets& tickets, Progress& progress, nanobind::handle group, nanobind::handle backend)
        : tickets_(tickets), progress_(progress), group_object_(nanobind::borrow(group)),
          backend_(nanobind::borrow(backend)) {}

    // Draws the ticket, queues the call and makes its Work.
    static PyObject* start(int kind, std::unique_ptr<FlyingCall> call);

    nanobind::object wait(std::int64_t end_ns) override;
    void cut_short() override;
    bool is_complete() override { return progress_.is_complete(*this); }
    bool test() override;
    bool hear(std::uint64_t its_token) override { return progress_.hear(*this, its_token); }
    void on_interrupt(nanobind::handle) override {}  // only the wait has ended, the call goes on
    nanobind::object backend() override { return backend_; }
    PyObject* group() const override { return group_object_.ptr(); }

protected:
    // Hears of its ticket before it is queued.
    virtual void on_ticket() {}
    // The error of a call that its rank has cut short by leaving.
    nanobind::object left_error() const;
    // Runs a call that nobody has begun on the thread of who waits for it, which has the GIL.
    virtual void run_here() = 0;
    // The last that is done with the call on a thread that does not own it.
    void complete();
    // At the end of its life: takes it out of the queue, or waits for whoever runs it. `abandon` makes that short.
    template <class Abandon>
    void withdraw(const Abandon& abandon) {
        if (ticket_ == 0 || is_complete()) {
            return;
        }
        if (progress_.claim(*this)) {
            tickets_.end(ticket_);
            return;
        }
        abandon();
        const WithoutGil unlocked;
        while (!progress_.wait(*this, poll_ns)) {
        }
    }

    Tickets& tickets_;
    Progress& progress_;
    const nanobind::object group_object_, backend_;
    int kind_ = -1;
    std::uint64_t ticket_ = 0;
    bool is_cut_short_ = false;
};

// Starts a call whose collectives Python does, one after the other: `run(ticket, in_background)`, then `finish()`
// makes the result.
nanobind::object start_prepared(Tickets& tickets, Progress& progress, nanobind::handle group, nanobind::handle backend,
                                int kind, nanobind::handle run, nanobind::handle finish);

}  // namespace ferrodist::bind
