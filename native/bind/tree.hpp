// SPDX-License-Identifier: MIT OR Apache-2.0
// Tree: small arrays in lists, tuples and dicts that travel as one packed array, as ferrodist.arrays.trees and
// ferrodist.collectives.plan do it; ranks may mix the two.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "bind/convert.hpp"
#include "core/hash.hpp"

namespace ferrodist::bind {

class Tree {
public:
    static bool is_one(PyObject* object) {
        return PyList_CheckExact(object) || PyTuple_CheckExact(object) || PyDict_CheckExact(object);
    }

    // Takes a tree apart whose arrays have one dtype and at most so many bytes each; false: the general path.
    bool read(PyObject* tree, std::size_t most_nbytes);
    // Adds what ranks compare of it: path, dtype and shape of every array.
    void add_to(Fingerprint& hash) const;

    DType dtype() const { return leaves_.front()->array.dtype; }
    std::size_t nbytes() const { return nbytes_; }
    bool has_integers() const;

    // All arrays, one behind the other; the result goes to memory of the same size.
    const std::byte* pack();
    std::byte* output() { return output_.get(); }
    // Makes room for the results; false: the general path.
    bool make_results();
    // The same tree with the results as its leaves.
    nanobind::object finish();

private:
    struct Leaf {
        std::string path;
        InputArray array;
        OutputArray result;
    };

    bool visit(PyObject* x, const std::string& path, int depth);
    nanobind::object build(PyObject* like, std::size_t& next);

    PyObject* tree_ = nullptr;
    std::vector<std::unique_ptr<Leaf>> leaves_;
    std::size_t nbytes_ = 0, most_nbytes_ = 0;
    std::unique_ptr<std::byte[]> input_, output_;
};

}  // namespace ferrodist::bind
