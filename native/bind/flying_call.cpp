// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/flying_call.hpp"

#include <algorithm>

#include "bind/gil_hook.hpp"
#include "bind/hooks.hpp"
#include "core/futex.hpp"
#include "core/process.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

constexpr std::int64_t longest_moment_ns = 1'000'000'000;

// A tree of arrays, an uneven call, objects: Python prepares each collective, and native code waits without the GIL.
class PreparedCall final : public FlyingCall {
public:
    PreparedCall(Tickets& tickets, Progress& progress, nb::handle group, nb::handle backend, nb::handle run,
                 nb::handle finish)
        : FlyingCall(tickets, progress, group, backend), run_(nb::borrow(run)), finish_(nb::borrow(finish)) {}
    ~PreparedCall() override {
        withdraw([] {});
    }

    void run() override {
        {
            const WithGil gil;
            run_python(true);
        }
        complete();
    }

    bool has_failed() override { return is_cut_short_ || error_.is_valid(); }
    nb::object error() override { return is_cut_short_ ? left_error() : error_; }
    nb::object result() override {
        nb::object made = nb::steal(call_python(finish_.ptr()));
        return made.is_valid() ? made : throw nb::python_error();
    }

private:
    void run_here() override {
        run_python(false);
        complete();
    }

    void run_python(bool in_background) {
        const nb::object done = nb::steal(
            call_python_with(run_.ptr(), "KO", static_cast<unsigned long long>(ticket_), in_background ? Py_True : Py_False));
        if (!done.is_valid()) {
            error_ = nb::steal(fetch_exception());
        }
    }

    const nb::object run_, finish_;
    nb::object error_;
};

}  // namespace

PyObject* FlyingCall::start(int kind, std::unique_ptr<FlyingCall> call) {
    FlyingCall& self = *call;
    NewWork work({.kind = kind}, std::move(call));
    self.kind_ = kind;
    self.token = work.token();
    self.ticket_ = self.tickets_.take();
    work.set_number(self.ticket_);
    self.on_ticket();
    self.progress_.post(self);
    return work.release();
}

nb::object FlyingCall::wait(std::int64_t end_ns) {
    if (end_ns == 0 && progress_.claim(*this)) {
        run_here();
        return {};
    }
    GilHook hook;
    hook.let_go();
    bool is_complete = false, goes_on = true;
    while (!is_complete && goes_on && (end_ns == 0 || core::now_ns() < end_ns)) {
        const std::int64_t rest = end_ns == 0 ? poll_ns : std::min(poll_ns, end_ns - core::now_ns());
        is_complete = progress_.wait(*this, std::max<std::int64_t>(rest, 0));
        goes_on = is_complete || hook.poll();
    }
    hook.take_back();
    return hook.error();
}

// A call whose ticket has ended is complete a moment later: whoever saw that, by a later call, finds it so.
bool FlyingCall::test() {
    if (is_complete() || tickets_.ended() < ticket_) {
        return is_complete();
    }
    const WithoutGil unlocked;
    return progress_.wait(*this, longest_moment_ns);
}

void FlyingCall::cut_short() {
    is_cut_short_ = true;
    tickets_.end(ticket_);
    complete();
}

nb::object FlyingCall::left_error() const {
    nb::object made = nb::steal(call_python_with(hooks().left_error, "OiK", backend_.ptr(), kind_,
                                                      static_cast<unsigned long long>(ticket_)));
    return made.is_valid() ? made : throw nb::python_error();
}

void FlyingCall::complete() {
    if (const std::uint64_t its_token = progress_.finish(*this, has_failed()); its_token != 0) {
        core::Completions::of_process().add(its_token);
    }
}

nb::object start_prepared(Tickets& tickets, Progress& progress, nb::handle group, nb::handle backend, int kind,
                          nb::handle run, nb::handle finish) {
    auto call = std::make_unique<PreparedCall>(tickets, progress, group, backend, run, finish);
    return nb::steal(FlyingCall::start(kind, std::move(call)));
}

}  // namespace ferrodist::bind
