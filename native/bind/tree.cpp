// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/tree.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

constexpr int deepest = 16;

// The keys in the order in which ranks agree on them; invalid unless all are str.
nb::object sorted_keys(PyObject* dict) {
    nb::object keys = nb::steal(PyDict_Keys(dict));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.ptr()); ++i) {
        if (!PyUnicode_CheckExact(PyList_GET_ITEM(keys.ptr(), i))) {
            return {};
        }
    }
    if (PyList_Sort(keys.ptr()) != 0) {
        throw nb::python_error();
    }
    return keys;
}

// Appends the step to an element.
void append_step(std::string& path, PyObject* key) {
    const nb::object text = nb::steal(PyObject_Repr(key));
    Py_ssize_t size = 0;
    const char* bytes = text.is_valid() ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
    if (bytes == nullptr) {
        throw nb::python_error();
    }
    path.append("[").append(bytes, static_cast<std::size_t>(size)).append("]");
}

// A list or tuple of the same length. Other threads may find it: a list of None, and a tuple as Python's own are while
// they are made.
nb::object new_sequence_like(PyObject* like) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(like);
    if (PyTuple_CheckExact(like)) {
        return checked(PyTuple_New(size));
    }
    nb::object made = checked(PyList_New(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyList_SET_ITEM(made.ptr(), i, Py_NewRef(Py_None));
    }
    return made;
}

}  // namespace

void Tree::Slot::set(nb::object value) const {
    if (key == nullptr) {
        Py_XSETREF(PySequence_Fast_ITEMS(container)[index], value.release().ptr());
    } else if (PyDict_SetItem(container, key, value.ptr()) != 0) {
        throw nb::python_error();
    }
}

bool Tree::read(PyObject* tree, std::size_t most_nbytes) {
    most_nbytes_ = most_nbytes;
    result_ = visit(tree, 0);
    return result_.is_valid() && leaves_.size() > 1;
}

// The same tree with room for the results; invalid: the general path. A dict keeps the order of its keys; its leaves
// come in sorted order.
nb::object Tree::visit(PyObject* tree, int depth) {
    if (PyDict_CheckExact(tree)) {
        nb::object made = checked(PyDict_Copy(tree));
        const nb::object keys = sorted_keys(made.ptr());
        for (Py_ssize_t i = 0; keys.is_valid() && i < PyList_GET_SIZE(keys.ptr()); ++i) {
            PyObject* const key = PyList_GET_ITEM(keys.ptr(), i);
            if (!visit_element(PyDict_GetItem(made.ptr(), key), {made.ptr(), key, 0}, depth)) {
                return {};
            }
        }
        return keys.is_valid() ? made : nb::object();
    }
    nb::object made = new_sequence_like(tree);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(made.ptr()); ++i) {
        if (i >= PySequence_Fast_GET_SIZE(tree) ||
            !visit_element(PySequence_Fast_GET_ITEM(tree, i), {made.ptr(), nullptr, i}, depth)) {
            return {};
        }
    }
    return made;
}

bool Tree::visit_element(PyObject* x, const Slot& slot, int depth) {
    const std::size_t length = path_.size();
    if (slot.key != nullptr) {
        append_step(path_, slot.key);
    } else {
        path_.append("[").append(std::to_string(slot.index)).append("]");
    }
    bool is_read = depth < deepest;
    if (is_read && is_one(x)) {
        const nb::object held = nb::borrow(x);  // a leaf's own conversion may empty the list that x is in
        nb::object made = visit(x, depth + 1);
        is_read = made.is_valid();
        if (is_read) {
            slot.set(std::move(made));
        }
    } else if (is_read) {
        is_read = add_leaf(x, slot);
    }
    path_.resize(length);
    return is_read;
}

bool Tree::add_leaf(PyObject* x, const Slot& slot) {
    Leaf& leaf = leaves_.emplace_back(x, slot, hash_text(path_));
    if (!leaf.array.read(x) || leaf.array.nbytes > most_nbytes_) {
        return false;
    }
    const auto code = static_cast<std::size_t>(leaf.array.dtype);
    has_dtype_.set(code);
    nbytes_of_[code] += leaf.array.nbytes;
    nbytes_ += leaf.array.nbytes;
    return true;
}

void Tree::add_to(Fingerprint& hash) const {
    for (const Leaf& leaf : leaves_) {
        hash.add(leaf.path_hash);
        hash.add(static_cast<std::int64_t>(leaf.array.dtype));
        hash.add(std::int64_t{leaf.array.num_axes});
        for (int axis = 0; axis < leaf.array.num_axes; ++axis) {
            hash.add(std::int64_t{leaf.array.shape[axis]});
        }
    }
}

std::size_t Tree::num_dtypes() const { return has_dtype_.count(); }

// Python's integers are of any size, and so must be their reduction: what could wrap is refused in words.
bool Tree::can_be_reduced(Op op) const {
    return std::ranges::all_of(leaves_, [&](const Leaf& leaf) {
        const bool is_integer = leaf.array.kind == ArrayKind::number && leaf.array.dtype == DType::int64;
        return can_reduce(leaf.array.dtype, op) && !is_integer;
    });
}

std::size_t Tree::packed_nbytes() const {
    return std::accumulate(nbytes_of_.begin(), nbytes_of_.end(), std::size_t{0},
                           [](std::size_t sum, std::size_t nbytes) { return sum + aligned(nbytes); });
}

void Tree::pack() {
    packed_ = std::make_unique_for_overwrite<std::byte[]>(2 * packed_nbytes());
    for_each_leaf([](Leaf& leaf, std::byte* place) { std::memcpy(place, leaf.array.data, leaf.array.nbytes); });
}

// Calls `visit(leaf, place)` for each array that has any bytes, with where it lies among the packed ones; one without may
// have no memory at all.
template <class Visit>
void Tree::for_each_leaf(const Visit& visit) {
    std::array<std::byte*, num_array_dtypes> places{};
    for_each_dtype([&](DType dtype, std::byte* packed, std::byte*, std::size_t) {
        places[static_cast<std::size_t>(dtype)] = packed;
    });
    for (Leaf& leaf : leaves_) {
        std::byte*& place = places[static_cast<std::size_t>(leaf.array.dtype)];
        if (leaf.array.nbytes > 0) {
            visit(leaf, place);
            place += leaf.array.nbytes;
        }
    }
}

bool Tree::make_results() {
    return std::ranges::all_of(leaves_, [](Leaf& leaf) {
        return leaf.result.make(leaf.array, leaf.array.num_axes, leaf.array.shape);
    });
}

nb::object Tree::finish() {
    for_each_leaf([this](Leaf& leaf, std::byte* place) {
        std::memcpy(leaf.result.data, place + packed_nbytes(), leaf.array.nbytes);
    });
    for (Leaf& leaf : leaves_) {
        leaf.slot.set(leaf.result.finish(leaf.x.ptr()));
    }
    return std::move(result_);
}

}  // namespace ferrodist::bind
