// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/calls.hpp"

#include <algorithm>

#include "bind/hooks.hpp"
#include "bind/wait.hpp"
#include "core/futex.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {

// -- waits of Python -------------------------------------------------------------------------------

bool GilHook::poll() {
    constexpr int polls_in_background = 10;
    held_.note();
    if (Progress::is_stopping_here()) {
        return false;
    }
    if (in_background_ && ++num_polls_ % polls_in_background != 0) {
        return true;
    }
    has_polled_ = true;
    take_back();
    const bool goes_on = in_python(PyErr_CheckSignals) == 0 && ask();
    if (!goes_on) {
        keep_error();
    }
    let_go();
    return goes_on;
}

// -- the queue -------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t nap_ns = 100'000, long_nap_ns = 2'000'000;
constexpr std::int64_t head_start_ns = 50'000, long_head_start_ns = 300'000;
constexpr int most_naps = 10;
constexpr int many_claimed = 16;
constexpr std::int64_t longest_moment_ns = 1'000'000'000;

thread_local const Progress* runs_here = nullptr;

}  // namespace

bool Progress::is_stopping_here() { return runs_here != nullptr && runs_here->is_stopping(); }

bool Progress::State::is_short() const { return queue.empty() || (queue.size() == 1 && queue.front()->is_short_); }

void Progress::start() {
    const std::lock_guard guard(state_->mutex);
    if (state_->is_stopping || state_->thread.joinable()) {
        return;
    }
    state_->thread = core::start_thread([this, state = state_.get()] {
        runs_here = this;
        core::HeldThread::exempt_this_thread();
        run(*state);
    });
}

void Progress::post(FlyingCall& call) {
    std::unique_lock lock(state_->mutex);
    if (state_->is_stopping) {
        call.state_ = FlyingCall::State::running;
        lock.unlock();
        return call.cut_short();
    }
    call.state_ = FlyingCall::State::queued;
    call.posted_ns_ = core::now_ns();
    call.place_ = state_->queue.insert(state_->queue.end(), &call);
    if (!state_->is_napping || (state_->is_nap_long && !state_->is_short())) {
        state_->posted.notify_one();
    }
}

bool Progress::claim(FlyingCall& call) {
    const std::lock_guard guard(state_->mutex);
    if (call.state_ != FlyingCall::State::queued) {
        return false;
    }
    state_->queue.erase(call.place_);
    call.state_ = FlyingCall::State::running;
    ++state_->num_claimed;
    return true;
}

void Progress::put_back(FlyingCall& call) {
    std::unique_lock lock(state_->mutex);
    if (state_->is_stopping) {
        lock.unlock();
        return call.cut_short();
    }
    call.state_ = FlyingCall::State::queued;
    call.place_ = state_->queue.insert(state_->queue.begin(), &call);
    --state_->num_claimed;
    if (!state_->is_napping) {
        state_->posted.notify_one();
    }
}

std::uint64_t Progress::finish(FlyingCall& call, bool has_failed) {
    const std::lock_guard guard(state_->mutex);
    call.state_ = FlyingCall::State::complete;
    state_->finished.notify_all();
    return has_failed || call.is_heard_if_done_ ? call.token_ : 0;
}

bool Progress::hear(FlyingCall& call, std::uint64_t token) {
    const std::lock_guard guard(state_->mutex);
    if (call.state_ == FlyingCall::State::complete) {
        return false;
    }
    call.token_ = token;
    call.is_heard_if_done_ = true;
    return true;
}

bool Progress::wait(FlyingCall& call, std::int64_t longest_ns) {
    std::unique_lock lock(state_->mutex);
    return state_->finished.wait_for(lock, std::chrono::nanoseconds(longest_ns),
                                     [&] { return call.state_ == FlyingCall::State::complete; });
}

bool Progress::is_complete(const FlyingCall& call) const {
    const std::lock_guard guard(state_->mutex);
    return call.state_ == FlyingCall::State::complete;
}

bool Progress::is_stopping() const {
    const std::lock_guard guard(state_->mutex);
    return state_->is_stopping;
}

void Progress::stop() {
    if (state_->birth.is_of_ancestor()) {  // a forked child: the thread is its parent's, and the lock may be held
        (void)state_.release();
        state_ = std::make_unique<State>();
        return;
    }
    {
        const std::lock_guard guard(state_->mutex);
        state_->is_stopping = true;
        state_->posted.notify_all();
    }
    if (state_->thread.joinable() && state_->thread.get_id() != std::this_thread::get_id()) {
        state_->thread.join();
    }
    std::list<FlyingCall*> left;
    {
        const std::lock_guard guard(state_->mutex);
        left.swap(state_->queue);
        for (FlyingCall* call : left) {
            call->state_ = FlyingCall::State::running;
        }
    }
    for (FlyingCall* call : left) {
        call->cut_short();
    }
}

// Takes naps for a while before it sleeps: in a loop of calls that are waited for at once it is not woken by each. After
// many such calls it leaves short ones alone for longer: each look at the queue takes the core from who does them.
void Progress::run(State& state) {
    pthread_setname_np(pthread_self(), "ferrodist-calls");
    const auto nap = [&](std::unique_lock<std::mutex>& lock, std::int64_t nanoseconds) {
        state.is_napping = true;
        state.is_nap_long = nanoseconds > nap_ns;
        const auto is_awake = [&] { return state.is_stopping || (state.is_nap_long && !state.is_short()); };
        state.posted.wait_for(lock, std::chrono::nanoseconds(nanoseconds), is_awake);
        state.is_napping = false;
    };
    const auto is_trusting = [&] { return state.num_claimed >= many_claimed; };
    std::unique_lock lock(state.mutex);
    int num_naps = 0;
    while (!state.is_stopping) {
        if (state.queue.empty()) {
            if (++num_naps < most_naps) {
                nap(lock, is_trusting() ? long_nap_ns : nap_ns);
            } else {
                state.posted.wait(lock);  // for a call, which may be done by now
                num_naps = 0;
            }
            continue;
        }
        FlyingCall& call = *state.queue.front();
        // The thread that made the call may be about to wait for it, and is quicker.
        const std::int64_t head_start = !state.is_short() ? head_start_ns : is_trusting() ? long_nap_ns : long_head_start_ns;
        if (const std::int64_t rest = call.posted_ns_ + head_start - core::now_ns(); rest > 0) {
            nap(lock, rest);
            continue;
        }
        state.queue.pop_front();
        call.state_ = FlyingCall::State::running;
        state.num_claimed = 0;
        num_naps = 0;
        lock.unlock();
        call.run();  // ends with finish(): the call may be gone after it
        lock.lock();
    }
}

// -- calls whose collectives Python does -----------------------------------------------------------

namespace {

// Does a call that has its ticket. `running.end(ticket, error)` settles with the other ranks what became of it.
nb::object run_call(Tickets& tickets, nb::handle running, std::uint64_t ticket, bool in_background) {
    static PyObject* const run = PyUnicode_InternFromString("run");
    static PyObject* const end = PyUnicode_InternFromString("end");
    const nb::object number = nb::steal(PyLong_FromUnsignedLongLong(ticket));
    const InsideCall inside(tickets, ticket);
    const nb::object result = nb::steal(call_method(run, running.ptr(), number.ptr(), in_background ? Py_True : Py_False));
    nb::object error = result.is_valid() ? nb::object() : nb::steal(fetch_exception());
    error = insist(std::move(error),
                   [&](PyObject* so_far) { return call_method(end, running.ptr(), number.ptr(), so_far); });
    tickets.end(ticket);
    return error.is_valid() ? throw_error(error) : result;
}

}  // namespace

// -- calls in flight -------------------------------------------------------------------------------

PyObject* FlyingCall::start(int kind, std::unique_ptr<FlyingCall> call) {
    FlyingCall& self = *call;
    NewWork work({.kind = kind}, std::move(call));
    self.kind_ = kind;
    self.token_ = work.token();
    start_or_raise([&] { self.calls_.progress.start(); });  // before the other ranks count on the call
    self.ticket_ = self.calls_.tickets.take();
    work.set_number(self.ticket_);
    self.on_ticket();
    self.calls_.progress.post(self);
    return work.release();
}

nb::object FlyingCall::wait(std::int64_t end_ns) {
    if (const std::uint64_t outer = InsideCall::number_of(calls_.tickets); outer != 0 && outer <= ticket_) {
        return call_python_with(hooks().nested, "OiK", backend_.ptr(), kind_, static_cast<unsigned long long>(outer));
    }
    if (end_ns == 0 && calls_.progress.claim(*this)) {
        run_here();
        return {};
    }
    GilHook hook;
    hook.let_go();
    bool is_complete = false, goes_on = true;
    while (!is_complete && goes_on && (end_ns == 0 || core::now_ns() < end_ns)) {
        const std::int64_t rest = end_ns == 0 ? poll_ns : std::min(poll_ns, end_ns - core::now_ns());
        is_complete = calls_.progress.wait(*this, std::max<std::int64_t>(rest, 0));
        goes_on = is_complete || hook.poll();
    }
    hook.take_back();
    return hook.error();
}

// A call whose ticket has ended is complete a moment later: a thread that saw that, by a later call, finds it so.
bool FlyingCall::test() {
    if (is_complete() || calls_.tickets.ended() < ticket_) {
        return is_complete();
    }
    const WithoutGil unlocked;
    return calls_.progress.wait(*this, longest_moment_ns);
}

void FlyingCall::cut_short() {
    is_cut_short_ = true;
    calls_.tickets.end(ticket_);
    complete();
}

nb::object FlyingCall::left_error() const {
    return call_python_with(hooks().left_error, "OiK", backend_.ptr(), kind_, static_cast<unsigned long long>(ticket_));
}

void FlyingCall::complete() {
    if (const std::uint64_t its_token = calls_.progress.finish(*this, has_failed()); its_token != 0) {
        core::Completions::of_process().add(its_token);
    }
}

namespace {

// A tree of arrays, an uneven call, objects: Python prepares each collective, and native code waits without the GIL.
class PreparedCall final : public FlyingCall {
public:
    PreparedCall(Calls& calls, nb::handle group, nb::handle backend, nb::handle running, nb::handle finish)
        : FlyingCall(calls, group, backend), running_(nb::borrow(running)), finish_(nb::borrow(finish)) {}
    ~PreparedCall() override {
        withdraw([] {});
    }

    bool has_failed() override { return is_cut_short_ || error_.is_valid(); }
    nb::object error() override { return is_cut_short_ ? left_error() : error_; }
    nb::object result() override { return checked(call_python(finish_.ptr())); }
    int traverse(visitproc visit, void* arg) const override {
        Py_VISIT(running_.ptr());
        Py_VISIT(finish_.ptr());
        Py_VISIT(error_.ptr());
        return FlyingCall::traverse(visit, arg);
    }

private:
    void run() override {
        {
            const WithGil gil;
            run_python(true);
        }
        complete();
    }
    void run_here() override {
        run_python(false);
        complete();
    }

    void run_python(bool in_background) {
        error_ = caught([&] { run_call(calls_.tickets, running_, ticket_, in_background); });
    }

    const nb::object running_, finish_;
    nb::object error_;
};

// Waits for the turn of a call; poll() may raise, or says how long to sleep.
void wait_for_turn(Tickets& tickets, std::uint64_t number, const nb::callable& poll) {
    core::HeldThread held;
    while (tickets.ended() + 1 < number) {
        held.note();
        const double longest = nb::cast<double>(checked(call_python(poll.ptr())));
        const WithoutGil unlocked;
        tickets.wait(number, to_ns(longest));
    }
}

}  // namespace

nb::object start_prepared(Calls& calls, nb::handle group, nb::handle backend, int kind, nb::handle running,
                          nb::handle finish) {
    auto call = std::make_unique<PreparedCall>(calls, group, backend, running, finish);
    return nb::steal(FlyingCall::start(kind, std::move(call)));
}

void add_calls(nb::module_& module) {
    using namespace nb::literals;
    module.def("guard", [](nb::handle run, nb::handle on_error) {
        nb::object result = nb::steal(call_python(run.ptr()));
        if (result.is_valid()) {
            return result;
        }
        return throw_error(insist(nb::steal(fetch_exception()),
                                  [&](PyObject* so_far) { return call_python(on_error.ptr(), so_far); }));
    }, "run"_a, "on_error"_a, "Return run(); if it raises, call on_error(error) until it returns, and raise.");
    nb::class_<Tickets>(module, "Tickets", "Numbers calls from 1; each runs when all before it have ended.")
        .def(nb::init<>())
        .def("take", &Tickets::take, "Draw the next number.")
        .def("run", [](Tickets& self, nb::handle running, std::uint64_t ticket, bool in_background) {
            return run_call(self, running, ticket == 0 ? self.take() : ticket, in_background);
        }, "running"_a, "ticket"_a = 0, "in_background"_a = false,
             "Do a call under the next number, or one drawn before.\n\nCalls running.run(number, in_background), then "
             "running.end(number, error or None) until it\nreturns. Returns what run returned, or raises.")
        .def("wait", &wait_for_turn, "number"_a, "poll"_a,
             "Wait until all calls before have ended; poll() may raise, or says how long to sleep.")
        .def("end", &Tickets::end, "number"_a, "End a call, also one that never ran.")
        .def_prop_ro("inside", &InsideCall::number_of, "The number of the call that this thread is in; 0 if in none.")
        .def_prop_ro("is_idle", &Tickets::is_idle, "Whether no call runs, or waits to.")
        .def_prop_ro("last_ended", &Tickets::ended, "The number of the last call that ended with all before it.");
}

bool TimeLimit::read(PyObject* timeout, const Calls& calls) {
    constexpr double longest = 1e9;  // seconds
    if (timeout == hooks().default_timeout) {
        *this = {calls.timeout_ns, calls.patience};
        return true;
    }
    *this = {};  // who chooses a timeout is not patient
    if (timeout == Py_None) {
        return true;
    }
    if (!PyFloat_CheckExact(timeout) && !PyLong_CheckExact(timeout)) {
        return false;
    }
    const double seconds = PyFloat_AsDouble(timeout);
    PyErr_Clear();  // an integer beyond all bounds
    timeout_ns = seconds > 1e-9 && seconds < longest ? static_cast<std::int64_t>(seconds * 1e9) : 0;
    return timeout_ns != 0;
}

}  // namespace ferrodist::bind
