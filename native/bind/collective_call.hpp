// SPDX-License-Identifier: MIT OR Apache-2.0
// CollectiveCall: a collective on one array, from the arguments of its public function to what they mean.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "bind/convert.hpp"
#include "core/hash.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::bind {

// The arguments of the fast path.
enum Argument { arg_backend, arg_kind, arg_x, arg_out, arg_op, arg_root, arg_options, num_arguments };
using Arguments = PyObject* const*;

constexpr std::int64_t carries_all = std::numeric_limits<std::int64_t>::max();

// Where a call is made from.
struct Place {
    int world, rank;
    bool reproducible;
    std::int64_t carried_nbytes;

    // Whether ferrodist moves an array itself, and not an engine; all ranks come to the same answer.
    bool carries(std::size_t nbytes) const { return static_cast<std::int64_t>(nbytes) <= carried_nbytes; }
};

// One collective of a call, as any kind of group does it.
struct Collective {
    shm::Kind kind;
    DType dtype = DType::uint8;
    Op op = Op::sum;
    int root = 0;
    const std::byte* source = nullptr;
    std::byte* target = nullptr;
    std::size_t nbytes = 0;  // of the input; in scatter of one part
    bool in_place = false, in_order = false;
    std::uint64_t fingerprint = 0;
    int index = 0;  // in its call
};

class CollectiveCall {
public:
    // Reads and checks all arguments, those of scatter but for its arrays, and makes room for the result. False:
    // the call takes the general path, which says what is wrong if something is.
    bool read(Arguments args, const Place& place);

    // Reads only kind, op and root.
    bool read_options(Arguments args, const Place& place);

    // The only collective of the call; not of scatter, which needs two.
    Collective collective(const Place& place) const;

    shm::Kind kind = shm::Kind::barrier;
    int op = -1, root = -1;  // -1 where the kind has none
    bool has_input = false, has_output = false, in_place = false;
    InputArray x;
    OutputArray out;
    std::uint64_t fingerprint = 0;

private:
    bool read_output(Arguments args, const Place& place);
    bool find_result_shape(int world);
    bool is_number_in_range(int world) const;
    bool may_overlap(const Place& place);

    int num_result_axes_ = 0;
    std::ptrdiff_t result_shape_[max_axes];
};

// What Call.fingerprint of ferrodist.call begins with; a test holds the two against each other.
Fingerprint begin_fingerprint(shm::Kind kind, int op, int root, bool reproducible);

// Reads an int from 0 up to a limit; false if it is none.
bool read_index(PyObject* object, int limit, int& into);

}  // namespace ferrodist::bind
