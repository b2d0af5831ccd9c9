// SPDX-License-Identifier: MIT OR Apache-2.0
// The short way of scatter: the root tells dtype and shape of the parts, then the parts go out.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "bind/arrays.hpp"
#include "bind/at_once.hpp"
#include "bind/turn.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

// What the root tells, as _tell_leaf of ferrodist.collectives.uneven: dtype, number of axes, lengths.
struct PartLeaf {
    std::array<std::int64_t, 2 + max_axes> numbers{};

    bool is_possible() const {
        return numbers[0] >= 0 && numbers[0] < static_cast<std::int64_t>(num_dtypes) && numbers[1] >= 0 &&
               numbers[1] <= max_axes;
    }
    DType dtype() const { return static_cast<DType>(numbers[0]); }
    int num_axes() const { return static_cast<int>(numbers[1]); }
    const std::ptrdiff_t* shape() const { return reinterpret_cast<const std::ptrdiff_t*>(numbers.data() + 2); }
    std::size_t nbytes() const {
        std::size_t product = item_size(dtype());
        for (int axis = 0; axis < num_axes(); ++axis) {
            product *= static_cast<std::size_t>(shape()[axis]);
        }
        return product;
    }
    bool is_form_of(const PlainArray& array) const {
        return array.dtype == dtype() && array.num_axes == num_axes() &&
               std::equal(shape(), shape() + num_axes(), array.shape);
    }
};
static_assert(sizeof(std::ptrdiff_t) == sizeof(std::int64_t));

// What is left of one rank's scatter once its arguments are known.
struct Scatter {
    int root = 0;
    bool is_root = false;
    std::optional<PlainArray> x{}, out{};  // none where None was passed
    PartLeaf leaf{};
};

bool read_array(PyObject* object, std::optional<PlainArray>& into) {
    if (object == Py_None) {
        return true;
    }
    into = try_plain_array(object);
    return into.has_value();
}

// The form of one part; false where the array cannot be cut among the ranks.
bool cut(const PlainArray& x, int world, PartLeaf& leaf) {
    if (world > 1 && (x.num_axes == 0 || x.shape[0] % world != 0)) {
        return false;
    }
    leaf.numbers[0] = static_cast<std::int64_t>(x.dtype);
    leaf.numbers[1] = x.num_axes;
    std::copy(x.shape, x.shape + x.num_axes, leaf.numbers.begin() + 2);
    if (world > 1) {
        leaf.numbers[2] /= world;
    }
    return true;
}

bool overlap(const PlainArray& a, const PlainArray& b) {
    return a.nbytes > 0 && b.nbytes > 0 && a.data < b.data + b.nbytes && b.data < a.data + a.nbytes;
}

// args: backend, kind, x, out, op, root. False sends the call the general way.
bool read(Scatter& call, const SharedGroup& group, PyObject* const* args) {
    const int world = group.group->size();
    if (!read_index(args[5], world, call.root) || !read_array(args[2], call.x) || !read_array(args[3], call.out)) {
        return false;
    }
    if (call.out && !call.out->is_writable) {
        return false;
    }
    call.is_root = call.root == group.group->rank();
    if (!call.is_root) {
        return true;
    }
    return call.x && cut(*call.x, world, call.leaf) && (!call.out || (call.leaf.is_form_of(*call.out) && !overlap(*call.x, *call.out)));
}

// The array of the result; null if what was passed does not fit, or the dtype is not NumPy's own.
nb::object place_for(const Scatter& call, PyObject* const* args) {
    const PartLeaf& leaf = call.leaf;
    if (!leaf.is_possible()) {
        return {};
    }
    const bool fits = (!call.x || call.is_root || leaf.is_form_of(*call.x)) && (!call.out || leaf.is_form_of(*call.out));
    if (!fits) {
        return {};
    }
    if (call.out) {
        return nb::borrow(args[3]);
    }
    return call.x ? nb::steal(new_array_like(args[2], leaf.num_axes(), leaf.shape()))
                  : new_array_of(leaf.dtype(), leaf.num_axes(), leaf.shape());
}

shm::Task first_task(Scatter& call, std::uint64_t fingerprint) {
    shm::Task task{shm::Kind::broadcast};
    task.dtype = DType::int64;
    task.root = call.root;
    task.source = task.target = reinterpret_cast<std::byte*>(call.leaf.numbers.data());
    task.nbytes = sizeof(call.leaf.numbers);
    task.in_place = true;
    task.fingerprint = fingerprint;
    return task;
}

shm::Task second_task(const Scatter& call, std::byte* target, std::uint64_t fingerprint) {
    shm::Task task{shm::Kind::scatter};
    task.dtype = call.leaf.dtype();
    task.root = call.root;
    task.source = call.is_root ? call.x->data : nullptr;
    task.target = target;
    task.nbytes = call.leaf.nbytes();
    task.fingerprint = fingerprint;
    return task;
}

}  // namespace

PyObject* scatter_at_once(SharedGroup& group, PyObject* const* args) {
    Scatter call;
    if (!read(call, group, args)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    const std::uint64_t fingerprint =
        begin_fingerprint(shm::Kind::scatter, -1, call.root, group.reproducible).value();
    Turn turn = begin_turn(group, args);
    if (!run_task(turn, group, first_task(call, fingerprint))) {
        return turn.fail();
    }
    nb::object place;
    try {
        place = place_for(call, args);
    } catch (nb::python_error& error) {
        error.restore();
        return turn.fail_with_error();
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
        return turn.fail_with_error();
    }
    if (!place.is_valid()) {
        const auto* bytes = reinterpret_cast<const char*>(call.leaf.numbers.data());
        return Py_BuildValue("(KN)", static_cast<unsigned long long>(turn.number()),
                             nb::bytes(bytes, sizeof(call.leaf.numbers)).release().ptr());
    }
    std::byte* const target = try_plain_array(place.ptr())->data;
    return run_task(turn, group, second_task(call, target, fingerprint + 1)) ? turn.end(place.ptr()) : turn.fail();
}

}  // namespace ferrodist::bind
