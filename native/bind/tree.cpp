// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/tree.hpp"

#include <cstring>

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

std::string step_of(PyObject* key) {
    const nb::object text = nb::steal(PyObject_Repr(key));
    Py_ssize_t size = 0;
    const char* bytes = text.is_valid() ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
    if (bytes == nullptr) {
        throw nb::python_error();
    }
    return "[" + std::string(bytes, static_cast<std::size_t>(size)) + "]";
}

}  // namespace

bool Tree::read(PyObject* tree, std::size_t most_nbytes) {
    tree_ = tree;
    most_nbytes_ = most_nbytes;
    return visit(tree, "", 0) && leaves_.size() > 1;
}

bool Tree::visit(PyObject* x, const std::string& path, int depth) {
    if (depth > deepest) {
        return false;
    }
    if (PyDict_CheckExact(x)) {
        const nb::object keys = sorted_keys(x);
        for (Py_ssize_t i = 0; keys.is_valid() && i < PyList_GET_SIZE(keys.ptr()); ++i) {
            PyObject* const key = PyList_GET_ITEM(keys.ptr(), i);
            if (!visit(PyDict_GetItem(x, key), path + step_of(key), depth + 1)) {
                return false;
            }
        }
        return keys.is_valid();
    }
    if (is_one(x)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(x); ++i) {
            if (!visit(PySequence_Fast_GET_ITEM(x, i), path + "[" + std::to_string(i) + "]", depth + 1)) {
                return false;
            }
        }
        return true;
    }
    auto leaf = std::make_unique<Leaf>();
    if (!leaf->array.read(x) || leaf->array.nbytes > most_nbytes_ ||
        (!leaves_.empty() && leaf->array.dtype != dtype())) {
        return false;
    }
    leaf->path = path;
    nbytes_ += leaf->array.nbytes;
    leaves_.push_back(std::move(leaf));
    return true;
}

void Tree::add_to(Fingerprint& hash) const {
    for (const auto& leaf : leaves_) {
        hash.add(hash_text(leaf->path));
        hash.add(static_cast<std::int64_t>(leaf->array.dtype));
        hash.add(std::int64_t{leaf->array.num_axes});
        for (int axis = 0; axis < leaf->array.num_axes; ++axis) {
            hash.add(std::int64_t{leaf->array.shape[axis]});
        }
    }
}

bool Tree::has_integers() const {
    for (const auto& leaf : leaves_) {
        if (leaf->array.kind == ArrayKind::number && leaf->array.dtype == DType::int64) {
            return true;
        }
    }
    return false;
}

const std::byte* Tree::pack() {
    input_ = std::make_unique_for_overwrite<std::byte[]>(nbytes_);
    output_ = std::make_unique_for_overwrite<std::byte[]>(nbytes_);
    std::byte* into = input_.get();
    for (const auto& leaf : leaves_) {
        if (leaf->array.nbytes > 0) {  // else there may be no memory at all
            std::memcpy(into, leaf->array.data, leaf->array.nbytes);
            into += leaf->array.nbytes;
        }
    }
    return input_.get();
}

bool Tree::make_results() {
    for (const auto& leaf : leaves_) {
        if (!leaf->result.make(leaf->array, leaf->array.num_axes, leaf->array.shape)) {
            return false;
        }
    }
    return true;
}

nb::object Tree::finish() {
    const std::byte* from = output_.get();
    for (const auto& leaf : leaves_) {
        if (leaf->array.nbytes > 0) {
            std::memcpy(leaf->result.data, from, leaf->array.nbytes);
            from += leaf->array.nbytes;
        }
    }
    std::size_t next = 0;
    return build(tree_, next);
}

// A dict comes back in the order of its keys; its leaves stand in sorted order.
nb::object Tree::build(PyObject* like, std::size_t& next) {
    if (PyDict_CheckExact(like)) {
        const nb::object keys = sorted_keys(like);
        nb::object made = nb::steal(PyDict_Copy(like));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.ptr()); ++i) {
            PyObject* const key = PyList_GET_ITEM(keys.ptr(), i);
            const nb::object value = build(PyDict_GetItem(like, key), next);
            if (PyDict_SetItem(made.ptr(), key, value.ptr()) != 0) {
                throw nb::python_error();
            }
        }
        return made;
    }
    if (is_one(like)) {
        const Py_ssize_t size = PySequence_Fast_GET_SIZE(like);
        nb::object made = nb::steal(PyList_CheckExact(like) ? PyList_New(size) : PyTuple_New(size));
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject* const value = build(PySequence_Fast_GET_ITEM(like, i), next).release().ptr();
            PyList_CheckExact(like) ? PyList_SET_ITEM(made.ptr(), i, value) : PyTuple_SET_ITEM(made.ptr(), i, value);
        }
        return made;
    }
    Leaf& leaf = *leaves_[next++];
    return leaf.result.finish(like);
}

}  // namespace ferrodist::bind
