// SPDX-License-Identifier: MIT OR Apache-2.0
// Turn: one call that goes the short way, from its number to its result.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind/gil_watch.hpp"
#include "bind/shared_group.hpp"
#include "hash.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::bind {

// What Call.fingerprint of ferrodist.call begins with; a test holds the two against each other.
Fingerprint begin_fingerprint(shm::Kind kind, int op, int root, bool reproducible);

class Turn {
public:
    // args: backend, kind, x, out, op, root. Takes the next number: nobody else may have a turn.
    Turn(SharedGroup& group, PyObject* const* args);

    std::uint64_t number() const { return number_; }
    // Does one collective of the call; false if it failed. Then fail() has to end the turn.
    bool run(const shm::Task& task);
    // Ends the turn and gives a new reference to the result.
    PyObject* end(PyObject* result);
    // Lets Python tell all ranks, raise, and end the turn.
    PyObject* fail();
    // The same for the exception that is set, of whatever was done between two collectives.
    PyObject* fail_with_error();

private:
    SharedGroup& group_;
    PyObject* const* args_;
    std::uint64_t number_;
    GilWatch watch_;
    shm::Patience patience_;
    shm::Ending ending_;
    int num_runs_ = 0;
};

// The short way of a scatter, with the same arguments. Where a rank's array turns out not to fit its
// part, gives the number of the turn and what the root has told: Python goes on from there.
PyObject* scatter_at_once(SharedGroup& group, PyObject* const* args);

}  // namespace ferrodist::bind
