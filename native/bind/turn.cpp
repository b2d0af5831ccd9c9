// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/turn.hpp"

#include <new>

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

// Below this a call takes a microsecond or two: letting go of the GIL would cost more than it gives.
constexpr std::size_t smallest_without_gil = 32 * 1024;

bool tell(PyObject* backend, const char* method) {
    PyObject* const nothing = PyObject_CallMethod(backend, method, nullptr);
    Py_XDECREF(nothing);
    return nothing != nullptr;
}

}  // namespace

Fingerprint begin_fingerprint(shm::Kind kind, int op, int root, bool reproducible) {
    Fingerprint hash;
    hash.add(static_cast<std::int64_t>(kind));
    hash.add(std::int64_t{op});
    hash.add(std::int64_t{root});
    hash.add(std::int64_t{0});  // no algorithm named
    hash.add(std::int64_t{reproducible});
    hash.add(std::int64_t{0});  // no pickle
    return hash;
}

Turn::Turn(SharedGroup& group, PyObject* const* args)
    : group_(group), args_(args), number_(group.turns.take()), watch_(args[0], "_look"),
      patience_{&watch_, 0, group.group->spins(), number_, group.timeout_ns} {}

bool Turn::run(const shm::Task& task) {
    if (task.nbytes >= smallest_without_gil) {
        watch_.let_go();
    }
    ++num_runs_;
    try {
        ending_ = shm::run(*group_.group, task, patience_);
        watch_.take_back();
    } catch (const std::bad_alloc& error) {  // no room for the staging area
        watch_.take_back();
        PyErr_SetString(PyExc_MemoryError, error.what());
        watch_.keep_error();
        ending_ = {shm::Outcome::interrupted};
    }
    return !ending_.failed();
}

PyObject* Turn::end(PyObject* result) {
    group_.turns.end(number_);
    const bool is_told = (!watch_.has_looked() || tell(args_[0], "_stop_looking")) &&
                         (group_.turns.is_idle() || tell(args_[0], "_wake_turns"));
    return is_told ? Py_NewRef(result) : nullptr;
}

PyObject* Turn::fail() {
    const nb::object error = watch_.error().is_valid() ? watch_.error() : nb::none();
    return PyObject_CallMethod(args_[0], "_fail_at_once", "iiKOOOOOi", static_cast<int>(ending_.outcome),
                               ending_.culprit, static_cast<unsigned long long>(number_), error.ptr(), args_[1],
                               args_[2], args_[4], args_[5], num_runs_);
}

PyObject* Turn::fail_with_error() {
    watch_.keep_error();
    ending_ = {shm::Outcome::interrupted};
    return fail();
}

}  // namespace ferrodist::bind
