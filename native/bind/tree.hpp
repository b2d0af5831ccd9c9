// SPDX-License-Identifier: MIT OR Apache-2.0
// Tree: small arrays in lists, tuples and dicts that travel as one packed array, as ferrodist.arrays.trees and
// ferrodist.collectives.plan do it; ranks may mix the two.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <bitset>
#include <cstddef>
#include <list>
#include <memory>
#include <memory_resource>
#include <string>

#include "bind/convert.hpp"
#include "core/hash.hpp"

namespace ferrodist::bind {

// Nothing of the caller's lists and dicts is looked at again once they are read: other threads may change them while
// the call waits.
class Tree : core::NonCopyable {
public:
    static bool is_one(PyObject* object) {
        return PyList_CheckExact(object) || PyTuple_CheckExact(object) || PyDict_CheckExact(object);
    }

    // Takes a tree apart whose arrays have at most so many bytes each; false: the general path.
    bool read(PyObject* tree, std::size_t most_nbytes);
    // Adds what ranks compare of it: path, dtype and shape of every array.
    void add_to(Fingerprint& hash) const;

    std::size_t nbytes() const { return nbytes_; }
    std::size_t num_dtypes() const;
    bool can_be_reduced(Op op) const;

    // Puts the arrays of each dtype one behind the other, the dtypes in order; the results go to memory of the same size.
    void pack();
    // Calls `visit(dtype, packed, output, nbytes)` for each dtype, in order.
    template <class Visit>
    void for_each_dtype(const Visit& visit) {
        std::byte* begin = packed_.get();
        for (std::size_t code = 0; code < num_array_dtypes; ++code) {
            if (has_dtype_[code]) {
                visit(static_cast<DType>(code), begin, begin + packed_nbytes(), nbytes_of_[code]);
                begin += aligned(nbytes_of_[code]);
            }
        }
    }
    // Makes room for the results; false: the general path.
    bool make_results();
    // The same tree with the results as its leaves.
    nanobind::object finish();

private:
    // Where a result goes: an element of a list or tuple, or of a dict if there is a key. The result keeps both.
    struct Slot {
        PyObject* container;
        PyObject* key;
        Py_ssize_t index;

        void set(nanobind::object value) const;
    };
    struct Leaf {
        Leaf(PyObject* object, const Slot& its_slot, std::uint64_t hash)
            : x(nanobind::borrow(object)), slot(its_slot), path_hash(hash) {}

        nanobind::object x;
        Slot slot;
        std::uint64_t path_hash;
        InputArray array;
        OutputArray result;
    };
    static constexpr std::size_t alignment = 64;
    static constexpr std::size_t aligned(std::size_t nbytes) { return (nbytes + alignment - 1) / alignment * alignment; }
    // What the arrays of all dtypes take when each dtype begins where it may.
    std::size_t packed_nbytes() const;

    static constexpr std::size_t num_near = 4;  // leaves that need no memory of their own, as malloc is slow for such sizes

    template <class Visit>
    void for_each_leaf(const Visit& visit);
    nanobind::object visit(PyObject* tree, int depth);
    bool visit_element(PyObject* x, const Slot& slot, int depth);
    bool add_leaf(PyObject* x, const Slot& slot);

    nanobind::object result_;
    std::string path_;  // of what is visited
    alignas(std::max_align_t) std::byte near_[num_near * (sizeof(Leaf) + 2 * sizeof(void*))];
    std::pmr::monotonic_buffer_resource memory_{near_, sizeof near_};
    std::pmr::list<Leaf> leaves_{&memory_};
    std::size_t nbytes_ = 0, most_nbytes_ = 0;
    std::array<std::size_t, num_array_dtypes> nbytes_of_{};
    std::bitset<num_array_dtypes> has_dtype_;
    std::unique_ptr<std::byte[]> packed_;  // what goes out, then what comes
};

}  // namespace ferrodist::bind
