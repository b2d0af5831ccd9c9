// SPDX-License-Identifier: MIT OR Apache-2.0
#include "reduce/reduce.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind/hooks.hpp"
#include "bind/python.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

// Below this a reduction takes about a microsecond, and a thread that lets go of the GIL may have to
// wait for another one's whole time slice (5 ms) to get it back.
constexpr std::size_t smallest_without_gil = 32 * 1024;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

DType parse_dtype(std::size_t code) {
    if (code >= num_dtypes) {
        refuse("dtype code " + std::to_string(code) + " is unknown");
    }
    return static_cast<DType>(code);
}

DType parse_half(std::size_t code) {
    const DType dtype = parse_dtype(code);
    if (!is_half(dtype)) {
        throw nb::type_error("only float16 and bfloat16 can be widened and narrowed");
    }
    return dtype;
}

Op parse_op(std::size_t code, DType dtype) {
    if (code >= num_ops) {
        refuse("op code " + std::to_string(code) + " is unknown");
    }
    const Op op = static_cast<Op>(code);
    if (!can_reduce(dtype, op)) {
        throw nb::type_error("this op makes no sense for this dtype");
    }
    return op;
}

// The number of elements in so many bytes.
std::size_t count_items(std::size_t nbytes, std::size_t item) {
    if (nbytes % item != 0) {
        refuse(std::to_string(nbytes) + " bytes are no multiple of the itemsize " +
               std::to_string(item));
    }
    return nbytes / item;
}

// The operands of a reduction, all as long as its result.
class Operands {
public:
    Operands(const nb::sequence& buffers, std::size_t nbytes) {
        const Items items(buffers);
        views_.reserve(items.size());
        addresses_.reserve(items.size());
        for (PyObject* buffer : items) {
            views_.push_back(readable(buffer));
            addresses_.push_back(views_.back().data());
            require_length(nbytes);
        }
        if (views_.empty()) {
            refuse("local_reduce needs at least one operand");
        }
    }

    const void* const* addresses() const { return addresses_.data(); }
    std::size_t size() const { return addresses_.size(); }

private:
    void require_length(std::size_t nbytes) const {
        if (views_.back().nbytes() != nbytes) {
            refuse("operand " + std::to_string(views_.size() - 1) + " has " +
                   std::to_string(views_.back().nbytes()) + " bytes, into has " +
                   std::to_string(nbytes));
        }
    }

    std::vector<View> views_;
    std::vector<const void*> addresses_;
};

template <class Work>
void run(std::size_t nbytes, const Work& work) {
    nbytes < smallest_without_gil ? work() : without_gil(work);
}

void reduce_buffers(std::size_t dtype_code, std::size_t op_code, nb::handle into,
                  const nb::sequence& operands, std::uint64_t divisor) {
    const DType dtype = parse_dtype(dtype_code);
    const Op op = parse_op(op_code, dtype);
    if (divisor == 0) {
        refuse("divisor must be at least 1, got 0");
    }
    const View result = writable(into);
    const Operands inputs(operands, result.nbytes());
    const std::size_t count = count_items(result.nbytes(), item_size(dtype));
    run(result.nbytes() * inputs.size(), [&] {
        local_reduce(dtype, op, result.data(), inputs.addresses(), inputs.size(), count, divisor);
    });
}

// Converts between 16-bit floats and float32, in one of the two directions.
template <auto convert, bool to_halves>
void convert_buffer(std::size_t dtype_code, nb::handle into, nb::handle source) {
    const DType dtype = parse_half(dtype_code);
    const View result = writable(into), input = readable(source);
    const View &halves = to_halves ? result : input, &floats = to_halves ? input : result;
    const std::size_t count = count_items(halves.nbytes(), 2), num_floats = count_items(floats.nbytes(), 4);
    if (count != num_floats) {
        refuse(std::to_string(count) + " 16-bit floats do not go with " + std::to_string(num_floats) + " float32");
    }
    run(floats.nbytes(), [&] { convert(dtype, result.data(), input.data(), count); });
}

DType parse_ordered(std::size_t code) {
    const DType dtype = parse_dtype(code);
    if (dtype > DType::float64) {
        throw nb::type_error("only real numbers have an order");
    }
    return dtype;
}

// Calls `use` with the dtypes and the memory of pairs, of values and of indices, and the number of pairs.
template <class Use>
void with_pairs(std::size_t dtype, std::size_t index_dtype, const View& pairs, const View& values, const View& indices,
                const Use& use) {
    const DType kinds[] = {parse_ordered(dtype), parse_ordered(index_dtype)};
    const std::size_t count = count_items(pairs.nbytes(), item_size(DType::pair));
    if (count != count_items(values.nbytes(), item_size(kinds[0])) ||
        count != count_items(indices.nbytes(), item_size(kinds[1]))) {
        refuse("values and indices must be as many as pairs, " + std::to_string(count));
    }
    run(pairs.nbytes(), [&] { use(kinds, count); });
}

void pack_pairs(std::size_t dtype, std::size_t index_dtype, bool is_reversed, nb::handle into, nb::handle first,
                nb::handle second) {
    const View pairs = writable(into), values = readable(first), indices = readable(second);
    with_pairs(dtype, index_dtype, pairs, values, indices, [&](const DType* kinds, std::size_t count) {
        auto* const keys = reinterpret_cast<std::uint64_t*>(pairs.data());
        pack_keys(kinds[0], is_reversed, keys, values.data(), count);
        pack_keys(kinds[1], false, keys + 1, indices.data(), count);
    });
}

void unpack_pairs(std::size_t dtype, std::size_t index_dtype, bool is_reversed, nb::handle source, nb::handle first,
                  nb::handle second) {
    const View pairs = readable(source), values = writable(first), indices = writable(second);
    with_pairs(dtype, index_dtype, pairs, values, indices, [&](const DType* kinds, std::size_t count) {
        const auto* const keys = reinterpret_cast<const std::uint64_t*>(pairs.data());
        unpack_keys(kinds[0], is_reversed, values.data(), keys, count);
        unpack_keys(kinds[1], false, indices.data(), keys + 1, count);
    });
}

void use_cpu_level(std::string_view name) {
    if (try_use_cpu_level(name)) {
        return;
    }
    std::string known;
    for (std::string_view level : cpu_levels()) {
        known += known.empty() ? "" : ", ";
        known += level;
    }
    refuse("this machine cannot run cpu level '" + std::string(name) + "'; it can run: " + known);
}

}  // namespace

void add_reduce(nb::module_& module) {
    module.def("local_reduce", &reduce_buffers, "dtype"_a, "op"_a, "into"_a, "operands"_a, "divisor"_a = 1,
               "Reduce the operands from left to right into one buffer; MEAN divides by divisor.");
    module.def("widen", &convert_buffer<&widen, false>, "dtype"_a, "into"_a, "source"_a,
               "Convert 16-bit floats to float32.");
    module.def("narrow", &convert_buffer<&narrow, true>, "dtype"_a, "into"_a, "source"_a,
               "Round float32 to 16-bit floats, to nearest even.");
    module.def("pack_pairs", &pack_pairs, "dtype"_a, "index_dtype"_a, "is_reversed"_a, "into"_a, "values"_a,
               "indices"_a, "Write values and indices as pairs, of which minloc finds the least, or the largest.");
    module.def("unpack_pairs", &unpack_pairs, "dtype"_a, "index_dtype"_a, "is_reversed"_a, "source"_a, "values"_a,
               "indices"_a, "Read values and indices back.");
    module.def("cpu_levels", &cpu_levels,
               "Name the variants of the kernels this machine can run, best first.");
    module.def("cpu_level", &cpu_level, "Name the variant of the kernels in use.");
    module.def("use_cpu_level", &use_cpu_level, "name"_a,
               "Use another variant of the kernels; all give the same bits.");
}

}  // namespace ferrodist::bind
