// SPDX-License-Identifier: MIT OR Apache-2.0
// PlainCall: a call on plain NumPy arrays, from its arguments to what they mean.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "bind/arrays.hpp"
#include "hash.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::bind {

struct PlainCall {
    shm::Kind kind;
    int op = -1, root = -1;  // -1 where the kind has none
    std::optional<PlainArray> x{};
    int num_axes = 0;
    std::ptrdiff_t shape[max_axes] = {};  // of the result
    bool has_result = true;
};

// What Call.fingerprint of ferrodist.call begins with; a test holds the two against each other.
Fingerprint begin_fingerprint(shm::Kind kind, int op, int root, bool reproducible);
std::uint64_t fingerprint(const PlainCall& call, bool reproducible);

// Reads an int from 0 up to a limit; false sends the call the general way.
bool read_index(PyObject* object, int limit, int& into);

// args: backend, kind, x, out, op, root. False sends the call the general way.
bool read_plain_call(PlainCall& call, PyObject* const* args, int world, int rank);

// Where the result of a call goes: None if there is none on this rank, a new array, or the one that was
// passed. An invalid object sends the call the general way.
nanobind::object result_of(const PlainCall& call, PyObject* const* args);

// Callbacks of a Work run on a progress thread, and must not communicate.
void mark_progress_thread();
bool is_progress_thread();

}  // namespace ferrodist::bind
