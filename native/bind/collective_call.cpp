// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/collective_call.hpp"

#include <algorithm>
#include <cstring>

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

using shm::Kind;

bool is_prefix(Kind kind) { return kind == Kind::scan || kind == Kind::exscan; }

bool is_reduction(Kind kind) {
    return kind == Kind::allreduce || kind == Kind::reduce || kind == Kind::reduce_scatter || is_prefix(kind);
}

bool is_rooted(Kind kind) {
    return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::gather || kind == Kind::scatter;
}

// Reads a member of ferrodist.ReduceOp, or the name of one in upper or lower case; other spellings take the general
// path. A member is an int, but not every int is a member.
bool read_op(PyObject* object, int& into) {
    // Kept for good.
    static PyObject* const type = nb::module_::import_("ferrodist.reduce_op").attr("ReduceOp").inc_ref().ptr();
    static PyObject* const by_name = nb::module_::import_("ferrodist.reduce_op").attr("BY_NAME").inc_ref().ptr();
    if (PyUnicode_CheckExact(object)) {
        object = PyDict_GetItem(by_name, object);  // borrowed
    }
    return object != nullptr && Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(type) &&
           read_index(object, num_ops, into);
}

}  // namespace

Fingerprint begin_fingerprint(Kind kind, int op, int root, bool reproducible) {
    Fingerprint hash;
    hash.add(static_cast<std::int64_t>(kind));
    hash.add(std::int64_t{op});
    hash.add(std::int64_t{root});
    hash.add(std::int64_t{0});  // no algorithm named
    hash.add(std::int64_t{reproducible});
    hash.add(std::int64_t{0});  // no pickle
    return hash;
}

bool read_index(PyObject* object, int limit, int& into) {
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        return false;
    }
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(object, &overflow);
    into = static_cast<int>(value);
    return overflow == 0 && value >= 0 && value < limit;
}

bool CollectiveCall::read(Arguments args, const Place& place) {
    if (!read_options(args, place)) {
        return false;
    }
    Fingerprint hash = begin_fingerprint(kind, op, root, place.reproducible);
    fingerprint = hash.value();
    if (kind == Kind::barrier) {
        return true;
    }
    if (kind == Kind::scatter) {  // in which only the root knows how large the array is
        return place.carried_nbytes == carries_all;
    }
    if (!x.read(args[arg_x]) || !place.carries(x.nbytes) || (op >= 0 && !can_reduce(x.dtype, static_cast<Op>(op))) ||
        !is_number_in_range(place.world) || !find_result_shape(place.world)) {
        return false;
    }
    has_input = true;
    static const std::uint64_t no_path = hash_text("");
    hash.add(no_path);
    hash.add(static_cast<std::int64_t>(x.dtype));
    hash.add(std::int64_t{x.num_axes});
    for (int axis = 0; axis < x.num_axes; ++axis) {
        hash.add(std::int64_t{x.shape[axis]});
    }
    fingerprint = hash.value();
    return read_output(args, place);
}

bool CollectiveCall::read_options(Arguments args, const Place& place) {
    int number = 0;
    if (!read_index(args[arg_kind], shm::num_kinds, number)) {
        return false;
    }
    kind = static_cast<Kind>(number);
    if (is_reduction(kind) && !read_op(args[arg_op], op)) {
        return false;
    }
    if (is_prefix(kind) && static_cast<Op>(op) == Op::mean) {
        return false;
    }
    return !is_rooted(kind) || read_index(args[arg_root], place.world, root);
}

// A Python int is of any size, and so must be its reduction: what could wrap is refused in words. If each of
// W numbers passes, so does what they give together.
bool CollectiveCall::is_number_in_range(int world) const {
    if (x.kind != ArrayKind::number || x.dtype != DType::int64 || op < 0) {
        return true;
    }
    std::int64_t number, product = 1;
    std::memcpy(&number, x.data, sizeof(number));
    if (static_cast<Op>(op) == Op::sum) {
        return !__builtin_mul_overflow(number, std::int64_t{world}, &product);
    }
    for (int rank = 0; rank < world && static_cast<Op>(op) == Op::prod && (number > 1 || number < -1); ++rank) {
        if (__builtin_mul_overflow(product, number, &product)) {
            return false;
        }
    }
    return true;
}

// False where the array cannot be cut among the ranks.
bool CollectiveCall::find_result_shape(int world) {
    num_result_axes_ = x.num_axes;
    std::copy(x.shape, x.shape + x.num_axes, result_shape_);
    const bool is_cut = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
    if (is_cut && world > 1) {
        if (x.num_axes == 0 || x.shape[0] % world != 0) {
            return false;
        }
        result_shape_[0] = kind == Kind::all_to_all ? x.shape[0] : x.shape[0] / world;
    }
    if (kind == Kind::all_gather || kind == Kind::gather) {
        num_result_axes_ = std::max(x.num_axes, 1);
        result_shape_[0] = (x.num_axes == 0 ? 1 : x.shape[0]) * world;
    }
    return true;
}

bool CollectiveCall::read_output(Arguments args, const Place& place) {
    if (((kind == Kind::reduce || kind == Kind::gather) && root != place.rank) ||
        (kind == Kind::exscan && place.rank == 0)) {
        return true;
    }
    has_output = true;
    if (args[arg_out] == Py_None) {
        return out.make(x, num_result_axes_, result_shape_);
    }
    return out.read(args[arg_out]) && out.dtype == x.dtype && out.has_shape(num_result_axes_, result_shape_) &&
           may_overlap(place);
}

// `out` may be the memory of x, or the part of it that is this rank's.
bool CollectiveCall::may_overlap(const Place& place) {
    if (x.nbytes == 0 || out.nbytes == 0 || x.begin >= out.data + out.nbytes || out.data >= x.end) {
        return true;
    }
    in_place = true;
    const std::ptrdiff_t offset = x.data - out.data;
    if (x.data != x.begin || x.nbytes != static_cast<std::size_t>(x.end - x.begin)) {
        return false;  // strided
    }
    if (offset == 0 && x.nbytes == out.nbytes) {
        return true;
    }
    const bool is_joined = kind == Kind::all_gather || kind == Kind::gather;
    return (is_joined && offset == static_cast<std::ptrdiff_t>(x.nbytes) * place.rank) ||
           (kind == Kind::reduce_scatter && -offset == static_cast<std::ptrdiff_t>(out.nbytes) * place.rank);
}

Collective CollectiveCall::collective(const Place& place) const {
    return {kind,
            x.dtype,
            op < 0 ? Op::sum : static_cast<Op>(op),
            std::max(root, 0),
            has_input ? x.data : nullptr,
            has_output ? out.data : nullptr,
            has_input ? x.nbytes : 0,
            in_place,
            place.reproducible,
            fingerprint};
}

}  // namespace ferrodist::bind
