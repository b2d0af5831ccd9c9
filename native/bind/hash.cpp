// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/hash.hpp"

#include <nanobind/stl/string_view.h>

#include "bind/items.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

void add_number(Fingerprint& fingerprint, nb::handle number) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    if (overflow == 0) {
        fingerprint.add(std::int64_t{value});
        return;
    }
    // Refuses what is below int64 as well: it is negative.
    const unsigned long long large = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    fingerprint.add(std::uint64_t{large});
}

std::uint64_t fingerprint(const nb::sequence& numbers) {
    Fingerprint fingerprint;
    for (PyObject* number : Items(numbers)) {
        add_number(fingerprint, number);
    }
    return fingerprint.value();
}

}  // namespace

void add_hash(nb::module_& module) {
    module.def("hash_text", &hash_text, "text"_a, "Hash text to 64 bits.");
    module.def("fingerprint", &fingerprint, "numbers"_a,
               "Hash 64-bit numbers, signed or not, to 64 bits; order, length and sign matter.");
}

}  // namespace ferrodist::bind
