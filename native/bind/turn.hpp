// SPDX-License-Identifier: MIT OR Apache-2.0
// Turn: one call that goes the short way, from its number to its result, whatever does its collectives.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <new>

#include "bind/gil_watch.hpp"
#include "bind/turn_counter.hpp"
#include "shm/wait.hpp"

namespace ferrodist::bind {

class Turn {
public:
    // args: backend, kind, x, out, op, root. Takes the next number: nobody else may have a turn.
    Turn(TurnCounter& turns, PyObject* const* args, const shm::Spins& spins, std::int64_t timeout_ns)
        : turns_(turns), args_(args), number_(turns.take()), watch_(args[0], "_look"),
          patience_{&watch_, 0, spins, number_, timeout_ns} {}

    std::uint64_t number() const { return number_; }

    // Does one collective of the call; false if it failed. Then fail() has to end the turn.
    template <class Collective>
    bool run(bool without_gil, const Collective& collective) {
        if (without_gil) {
            watch_.let_go();
        }
        ++num_runs_;
        try {
            ending_ = collective(patience_);
            watch_.take_back();
        } catch (const std::bad_alloc& error) {  // no room for what it needs besides the arrays
            watch_.take_back();
            PyErr_SetString(PyExc_MemoryError, error.what());
            watch_.keep_error();
            ending_ = {shm::Outcome::interrupted};
        }
        return !ending_.failed();
    }

    // Ends the turn and gives a new reference to the result.
    PyObject* end(PyObject* result);
    // Lets Python tell all ranks, raise, and end the turn.
    PyObject* fail();
    // The same for the exception that is set, of whatever was done between two collectives.
    PyObject* fail_with_error();

private:
    TurnCounter& turns_;
    PyObject* const* args_;
    std::uint64_t number_;
    GilWatch watch_;
    shm::Patience patience_;
    shm::Ending ending_;
    int num_runs_ = 0;
};

}  // namespace ferrodist::bind
