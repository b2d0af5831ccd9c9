// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/work.hpp"

#include <structmember.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "bind/hooks.hpp"
#include "bind/wait.hpp"
#include "core/process.hpp"
#include "core/request.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {

struct WorkObject {
    PyObject_HEAD
    WorkRequest* request;  // null: the call was done at once
    PyObject* outcome;     // the result or the error, once somebody has made it
    CallFacts facts;
    core::Link<WorkObject> link;  // in the registry
    std::uint32_t place;      // in the registry, from 1 on; 0: it is not there
    int num_users;            // threads that use the request without the GIL: it stays as long
    bool is_error, is_asked;  // whether anybody looked at the outcome, so that no error is lost
    unsigned long settler;    // the thread that makes the outcome; 0: none
    bool is_heard;            // its Future has to be told
    bool is_cancelled;
};

namespace {

PyTypeObject* work_type = nullptr;  // the Python class; kept for good

// -- the registry ------------------------------------------------------------------------------------

// Holds Works by numbers that are not given twice: what stands for a Work in Completions never dangles.
class Registry {
public:
    // Never destroyed: calls in flight may outlive the interpreter. A forked child begins with none.
    static Registry& of_process() { return *current(); }
    static void begin_anew() { current() = new Registry; }

    void add(WorkObject& work) {
        drop_oldest();
        drop_next();
        drop_next();
        if (free_.empty()) {
            places_.push_back({});
            free_.reserve(places_.capacity());  // so that remove needs no memory
            free_.push_back(static_cast<std::uint32_t>(places_.size() - 1));
        }
        const std::uint32_t index = free_.back();
        free_.pop_back();
        places_[index].work = &work;
        ++places_[index].generation;
        work.place = index + 1;
        in_order_.push_back(work);
        Py_INCREF(&work);
    }

    // Takes a Work out; the caller gets the reference.
    WorkObject* take(WorkObject& work) {
        const std::uint32_t index = work.place - 1;
        places_[index].work = nullptr;
        free_.push_back(index);
        work.place = 0;
        in_order_.erase(work);
        return &work;
    }
    void remove(WorkObject& work) {
        if (work.place != 0) {
            Py_DECREF(take(work));
        }
    }

    std::uint64_t token(const WorkObject& work) const {
        return std::uint64_t{places_[work.place - 1].generation} << 32 | work.place;
    }
    WorkObject* find(std::uint64_t token) const {
        const auto index = static_cast<std::uint32_t>(token) - 1;
        const bool is_there = index < places_.size() && places_[index].generation == token >> 32;
        return is_there ? places_[index].work : nullptr;
    }

    // Lets go of those that are done and that nobody has asked for, up to the first that is not.
    void drop_oldest() {
        while (in_order_.front() != nullptr && is_done_unasked(*in_order_.front())) {
            remove(*in_order_.front());
        }
    }
    void drop_done() {
        for (const nb::object& work : all()) {
            if (auto* const one = reinterpret_cast<WorkObject*>(work.ptr()); is_done_unasked(*one)) {
                remove(*one);
            }
        }
    }
    std::vector<nb::object> all() const {
        std::vector<nb::object> found;
        for (WorkObject* work = in_order_.front(); work != nullptr; work = in_order_.after(*work)) {
            found.push_back(nb::borrow(reinterpret_cast<PyObject*>(work)));
        }
        return found;
    }

    bool has_listener = false;

private:
    struct Place {
        WorkObject* work = nullptr;
        std::uint32_t generation = 0;
    };

    static Registry*& current() {
        static auto* registry = new Registry;
        return registry;
    }

    // The oldest may stay in flight for long: behind it those that are done go as well, two for one that comes.
    void drop_next() {
        next_ = next_ + 1 < places_.size() ? next_ + 1 : 0;
        WorkObject* const work = places_.empty() ? nullptr : places_[next_].work;
        if (work != nullptr && is_done_unasked(*work)) {
            remove(*work);
        }
    }

    // One in use is about to be posted, or somebody waits for it.
    static bool is_done_unasked(const WorkObject& work) {
        return work.num_users == 0 && !work.is_heard && work.request != nullptr && work.request->is_complete() &&
               !work.request->has_failed();
    }

    std::vector<Place> places_;
    std::vector<std::uint32_t> free_;
    std::size_t next_ = 0;
    core::List<WorkObject, &WorkObject::link> in_order_;
};

Registry& registry() { return Registry::of_process(); }

// -- the outcome ---------------------------------------------------------------------------------------

std::mutex settle_mutex;
std::condition_variable& has_settled = *new std::condition_variable;  // a forked child must not destroy it

// Waits for a thread that makes an outcome.
void wait_for_settler(const WorkObject& work) {
    if (work.settler == PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "a Work was asked for the outcome that it is making");
        throw nb::python_error();
    }
    const WithoutGil unlocked;
    std::unique_lock lock(settle_mutex);
    has_settled.wait_for(lock, std::chrono::milliseconds(1));
}

void make_outcome(WorkObject& work) {
    nb::object found;
    try {
        work.is_error = work.request != nullptr && work.request->has_failed();
        found = work.request == nullptr ? nb::none() : work.is_error ? work.request->error() : work.request->result();
    } catch (nb::python_error& error) {
        error.restore();
        work.is_error = true;
        found = nb::steal(fetch_exception());
    }
    work.outcome = found.release().ptr();
}

// The arrays of a call whose outcome is made are not needed any more.
void release_request(WorkObject& work) {
    if (work.num_users == 0 && work.outcome != nullptr) {
        delete std::exchange(work.request, nullptr);
    }
}

// While it lives, the request of a Work does.
class InUse : core::NonCopyable {
public:
    explicit InUse(WorkObject& work) : work_(work) { ++work_.num_users; }
    ~InUse() {
        --work_.num_users;
        release_request(work_);
    }
    WorkRequest* operator->() const { return work_.request; }

private:
    WorkObject& work_;
};

// Logs an error that nobody has asked for, and has it kept for close().
void tell_of_unasked(WorkObject& work) {
    const nb::object backend = work.request->backend();
    const nb::object answer = nb::steal(call_python(
        hooks().on_unasked_error, backend.ptr(), reinterpret_cast<PyObject*>(&work), work.outcome));
    if (!answer.is_valid()) {
        PyErr_WriteUnraisable(hooks().on_unasked_error);
    }
}

// Makes result or error of a call that is complete, once.
void settle(WorkObject& work) {
    while (work.settler != 0) {
        wait_for_settler(work);
    }
    if (work.outcome != nullptr) {
        return;
    }
    const nb::object kept = nb::borrow(reinterpret_cast<PyObject*>(&work));
    work.settler = PyThread_get_thread_ident();
    make_outcome(work);
    work.settler = 0;
    has_settled.notify_all();
    if (!work.is_heard) {
        registry().remove(work);
        registry().drop_oldest();
    }
    if (work.is_error && !work.is_asked) {
        tell_of_unasked(work);
    }
    release_request(work);
}

bool is_over(const WorkObject& work) {
    return work.outcome != nullptr || work.request == nullptr || work.request->is_complete();
}

// Waits until a moment (0: none); false, with an exception set, if something ended the wait.
bool wait_until(WorkObject& work, std::int64_t end_ns) {
    if (is_over(work)) {
        return true;
    }
    const InUse request(work);
    nb::object error = request->wait(end_ns);
    if (!error.is_valid()) {
        return true;
    }
    if (!is_over(work)) {
        error = request->on_interrupt(std::move(error));
    }
    return raise(error.ptr()) != nullptr;
}

void raise_still_in_flight(WorkObject& work, double seconds) {
    const nb::object name = checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&work), "describe"));
    const std::unique_ptr<char, void (*)(void*)> text(PyOS_double_to_string(seconds, 'g', 6, 0, nullptr), PyMem_Free);
    PyErr_Format(PyExc_TimeoutError, "%U is still in flight after %s s", name.ptr(), text.get());
}

// Waits as a method with a timeout does; false with an exception set.
bool ask(WorkObject& work, PyObject* timeout) {
    work.is_asked = true;
    if (is_over(work)) {
        settle(work);
        return true;
    }
    double seconds = 0;
    std::int64_t end_ns = 0;
    if (timeout != Py_None) {
        seconds = PyFloat_AsDouble(timeout);
        if (seconds == -1 && PyErr_Occurred() != nullptr) {
            return false;
        }
        if (seconds < 9e9 && !std::isnan(seconds)) {
            end_ns = core::now_ns() + to_ns(std::max(seconds, 0.0));
        }
    }
    if (!wait_until(work, end_ns)) {
        return false;
    }
    if (!is_over(work)) {
        raise_still_in_flight(work, seconds);
        return false;
    }
    settle(work);
    return true;
}

// -- methods -------------------------------------------------------------------------------------------

WorkObject& as_work(PyObject* self) { return *reinterpret_cast<WorkObject*>(self); }

using Method = PyObject* (*)(WorkObject& work, PyObject* timeout);

// A method with one argument, which may be omitted or named.
template <Method method>
PyObject* call_method(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    const Py_ssize_t num_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    const bool is_named = num_names == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") == 0;
    if (num_args + num_names > 1 || (num_names == 1 && !is_named)) {
        PyErr_SetString(PyExc_TypeError, "expected at most one argument, timeout");
        return nullptr;
    }
    return safely([&] { return method(as_work(self), num_args + num_names == 1 ? args[0] : Py_None); });
}

PyObject* result_of(WorkObject& work, PyObject* timeout) {
    if (!ask(work, timeout)) {
        return nullptr;
    }
    return work.is_error ? raise(work.outcome) : Py_NewRef(work.outcome);
}

PyObject* exception_of(WorkObject& work, PyObject* timeout) {
    if (!ask(work, timeout)) {
        return nullptr;
    }
    if (work.is_cancelled) {  // as a Future does
        return raise(work.outcome);
    }
    return Py_NewRef(work.is_error ? work.outcome : Py_None);
}

// As result, but what it is given may be any duration.
PyObject* wait_for(WorkObject& work, PyObject* timeout) {
    if (timeout == Py_None) {
        return result_of(work, timeout);
    }
    return result_of(work, checked(call_python(hooks().check_wait, timeout)).ptr());
}

template <PyObject* (*method)(WorkObject& work)>
PyObject* call_plain(PyObject* self, PyObject*) {
    return safely([&] { return method(as_work(self)); });
}

PyObject* is_done(WorkObject& work) { return PyBool_FromLong(is_over(work) || InUse(work)->test()); }

PyObject* meet(WorkObject& work) { return PyBool_FromLong(is_over(work) || InUse(work)->meet()); }

PyObject* is_next(WorkObject& work) { return PyBool_FromLong(is_over(work) || InUse(work)->is_next()); }

// Result and error, one of which is None.
PyObject* outcome_of(WorkObject& work) {
    settle(work);
    return PyTuple_Pack(2, work.is_error ? Py_None : work.outcome, work.is_error ? work.outcome : Py_None);
}

// Waits, up to a deadline, without asking for the outcome; tells whether there is one.
PyObject* wait_for_end(WorkObject& work, PyObject* deadline) {
    const std::int64_t end_ns = Deadline(deadline).at_ns;
    do {
        if (!wait_until(work, end_ns)) {
            return nullptr;
        }
    } while (!is_over(work) && end_ns == 0);
    return PyBool_FromLong(is_over(work));
}

// Has the callbacks thread told of its end; false if it is over.
PyObject* hear_of(WorkObject& work) {
    if (is_over(work)) {
        Py_RETURN_FALSE;
    }
    if (work.place == 0) {
        registry().add(work);
    }
    work.is_heard = true;  // before it is, so that nobody takes it out meanwhile
    work.is_heard = InUse(work)->hear(registry().token(work));
    return PyBool_FromLong(work.is_heard);
}

// Withdraws a call that nobody else counts on; what is raised then was asked for.
PyObject* cancel(WorkObject& work) {
    if (is_over(work)) {
        Py_RETURN_FALSE;
    }
    const bool was_asked = work.is_asked;
    work.is_asked = true;  // before others see that it is over
    work.is_cancelled = InUse(work)->cancel();
    work.is_asked = work.is_cancelled || was_asked;
    return PyBool_FromLong(work.is_cancelled);
}

PyObject* facts_of(PyObject* self, void*) {
    const CallFacts& facts = as_work(self).facts;
    return Py_BuildValue("(iiiL)", facts.kind, facts.dst, facts.src, static_cast<long long>(facts.number));
}

// -- for the garbage collector: an error knows the frame that waited for the Work, which knows the Work --------------

int visit_work(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_work(self).outcome);
    return as_work(self).request == nullptr ? 0 : as_work(self).request->traverse(visit, arg);
}

// A Work in flight is never garbage: the registry holds it.
int clear_work(PyObject* self) {
    WorkObject& work = as_work(self);
    if (work.num_users == 0) {
        delete std::exchange(work.request, nullptr);
    }
    Py_CLEAR(work.outcome);
    return 0;
}

void end_work(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete as_work(self).request;
    Py_XDECREF(as_work(self).outcome);
    type->tp_free(self);
    Py_DECREF(type);
}

template <Method method>
PyCFunction named() {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_method<method>));
}

constexpr int with_names = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef methods[] = {
    {"wait", named<&wait_for>(), with_names,
     "wait($self, /, timeout=None)\n--\n\n"
     "Return the result; after ``timeout`` raise TimeoutError and leave the call going."},
    {"result", named<&result_of>(), with_names,
     "result($self, /, timeout=None)\n--\n\nReturn the result, waiting for it if necessary."},
    {"exception", named<&exception_of>(), with_names,
     "exception($self, /, timeout=None)\n--\n\nReturn the error of the call, None if it went well."},
    {"done", &call_plain<&is_done>, METH_NOARGS, "done($self, /)\n--\n\nTell whether the call is over."},
    {"_meet", &call_plain<&meet>, METH_NOARGS,
     "_meet($self, /)\n--\n\nDo a short call now if all ranks are about to; tell whether it is over."},
    {"_is_next", &call_plain<&is_next>, METH_NOARGS,
     "_is_next($self, /)\n--\n\nTell whether all calls of its group before it are over."},
    {"_outcome", &call_plain<&outcome_of>, METH_NOARGS,
     "_outcome($self, /)\n--\n\nReturn result and error of a call that is over."},
    {"_wait_for_end", named<&wait_for_end>(), with_names,
     "_wait_for_end($self, deadline, /)\n--\n\nWait without asking for the outcome; tell whether the call is over."},
    {"_cancel", &call_plain<&cancel>, METH_NOARGS,
     "_cancel($self, /)\n--\n\nWithdraw a receive that no message was matched with; False if it is too late."},
    {"_hear", &call_plain<&hear_of>, METH_NOARGS,
     "_hear($self, /)\n--\n\nHave next_completions() give it; False if it is over."},
    {},
};

PyMemberDef members[] = {
    {"is_asked", T_BOOL, offsetof(WorkObject, is_asked), 0, "Whether anybody looked at the outcome."},
    {},
};

PyGetSetDef properties[] = {
    {"_facts", &facts_of, nullptr, "Kind (-1: a message), dst, src, and sequence number or tag.", nullptr},
    {},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&end_work)},
    {Py_tp_traverse, reinterpret_cast<void*>(&visit_work)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear_work)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("The native half of a Work.")},
    {},
};

PyType_Spec spec = {"ferrodist._native.WorkBase", sizeof(WorkObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

// -- what Python asks of the registry ------------------------------------------------------------------

nb::list works_of(nb::handle group) {
    registry().drop_done();
    nb::list found;
    for (const nb::object& work : registry().all()) {
        const WorkRequest* const request = as_work(work.ptr()).request;
        if (group.is_none() || (request != nullptr && request->group() == group.ptr())) {
            found.append(work);
        }
    }
    return found;
}

// Whether the callbacks thread has Works that it has not finished with. Set with the GIL held, with which a Work leaves
// the registry: whoever looks finds it there, or finds this set.
class CallbacksInUse {
public:
    // Never destroyed, as the registry. A forked child begins with none.
    static CallbacksInUse& of_process() { return core::of_process<CallbacksInUse>(); }

    void set(bool is_set) {
        const std::lock_guard guard(mutex_);
        is_set_ = is_set;
        changed_.notify_all();
    }
    bool wait_for_end(std::int64_t longest_ns) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::nanoseconds(longest_ns), [&] { return !is_set_; });
    }

    const core::Birth birth;

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_set_ = false;
};

// The Works behind the tokens that have come; None if another thread gets them.
nb::object next_completions(std::uint64_t listener) {
    CallbacksInUse& callbacks = CallbacksInUse::of_process();
    callbacks.set(false);
    const auto tokens = without_gil([&] { return core::Completions::of_process().take(listener); });
    if (tokens.empty()) {
        return nb::none();
    }
    callbacks.set(true);
    nb::list found;
    for (const std::uint64_t token : tokens) {
        if (WorkObject* const work = registry().find(token)) {
            found.append(nb::steal(reinterpret_cast<PyObject*>(registry().take(*work))));
        }
    }
    return found;
}

}  // namespace

NewWork::NewWork(const CallFacts& facts, std::unique_ptr<WorkRequest> request) {
    work_ = reinterpret_cast<WorkObject*>(checked(work_type->tp_alloc(work_type, 0)).release().ptr());
    work_->facts = facts;
    work_->request = request.release();
    work_->num_users = 1;  // who posts it
    registry().add(*work_);  // from now on end_listening() ends no thread
    if (registry().has_listener) {
        return;
    }
    registry().has_listener = true;
    if (!nb::steal(call_python(hooks().start_callbacks)).is_valid()) {
        const nb::object error = nb::steal(fetch_exception());
        registry().has_listener = false;
        take_back();
        throw_error(error);
    }
}

NewWork::~NewWork() {
    if (work_ != nullptr) {
        take_back();
    }
}

void NewWork::take_back() {
    registry().remove(*work_);
    Py_DECREF(std::exchange(work_, nullptr));
}

std::uint64_t NewWork::token() const { return registry().token(*work_); }
void NewWork::set_number(std::uint64_t number) { work_->facts.number = static_cast<std::int64_t>(number); }

PyObject* NewWork::release() {
    --work_->num_users;
    release_request(*work_);
    return reinterpret_cast<PyObject*>(std::exchange(work_, nullptr));
}

PyObject* NewWork::release_done() {
    registry().remove(*work_);
    work_->outcome = Py_NewRef(Py_None);
    return release();
}

void add_work(nb::module_& module) {
    using namespace nb::literals;
    module.attr("WorkBase") = nb::steal(PyType_FromSpec(&spec));
    module.def("set_work_type", [](nb::handle type) {
        work_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
    }, "work_type"_a, "Set the class of Works, which derives from WorkBase.");
    module.def("works_of", &works_of, "group"_a.none(), "List the Works in flight of a group, or all.");
    module.def("forget_works", &Registry::begin_anew, "In a forked child: the Works in flight are the parent's.");
    module.def("begin_listening", [] { return core::Completions::of_process().begin_listening(); },
               "Let a new thread get the completions; return what it passes to next_completions().");
    module.def("end_listening", [] {
        registry().drop_done();
        if (registry().has_listener && registry().all().empty()) {
            registry().has_listener = false;
            core::Completions::of_process().begin_listening();  // no thread has that number
        }
    }, "Let the thread that gets the completions end, unless a Work is in flight.");
    module.def("next_completions", &next_completions, "listener"_a,
               "Wait for calls that are over and have callbacks, or errors; return their Works.\n\n"
               "None if another thread gets them.");
    module.def("wait_for_callbacks", [](double seconds) {
        return without_gil([&] { return CallbacksInUse::of_process().wait_for_end(to_ns(seconds)); });
    }, "seconds"_a, "Wait for callbacks that are running; tell whether none is.");
}

}  // namespace ferrodist::bind
