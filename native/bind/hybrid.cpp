// SPDX-License-Identifier: MIT OR Apache-2.0
// Groups in two levels, and the programs of their collectives, for Python.
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/groups.hpp"
#include "bind/hooks.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {
namespace {

using hybrid::Program;
using SpanTuple = std::tuple<int, std::uint64_t, std::uint64_t>;  // space, begin, nbytes

hybrid::Span span_of(const SpanTuple& tuple) {
    const auto [space, begin, nbytes] = tuple;
    require(space >= 0 && space <= static_cast<int>(hybrid::Space::scratch), "unknown space");
    return {static_cast<hybrid::Space>(space), begin, nbytes};
}

DType dtype_of(std::size_t dtype) {
    require(dtype < num_dtypes, "unknown dtype");
    return static_cast<DType>(dtype);
}

void add_intra_node(Program& self, std::uint32_t kind, std::size_t dtype, std::size_t op, int root,
                    const SpanTuple& source, const SpanTuple& target, std::uint64_t nbytes, bool in_place) {
    require(kind < shm::num_kinds, "unknown kind");
    require(op < num_ops && can_reduce(dtype_of(dtype), static_cast<Op>(op)), "this op makes no sense for this dtype");
    self.add(hybrid::IntraNode{static_cast<shm::Kind>(kind), dtype_of(dtype), static_cast<Op>(op), root,
                               span_of(source), span_of(target), nbytes, in_place});
}

void add_inter_node(Program& self, const std::shared_ptr<net::Plan>& plan, const SpanTuple& source,
                    const SpanTuple& target, bool in_place) {
    const hybrid::Span input = span_of(source), output = span_of(target);
    require(input.nbytes >= plan->source_nbytes() && output.nbytes >= plan->target_nbytes(), "too short for the plan");
    self.add(hybrid::InterNode{plan, input, output, in_place});
}

CallStatus execute(HybridGroup& self, const Program& program, nb::handle source, nb::handle target,
                   std::uint32_t call_kind, std::uint64_t sequence, std::uint64_t fingerprint, int index,
                   nb::handle deadline, bool in_background, nb::handle poll) {
    const View input = readable_if(source), output = writable_if(target);
    require(input.nbytes() >= program.nbytes_of(hybrid::Space::input), "the source is too short");
    require(output.nbytes() >= program.nbytes_of(hybrid::Space::output), "the target is too short");
    const hybrid::Task task{input.data(), output.data(), call_kind, sequence, fingerprint, index};
    return wait_without_gil({deadline, in_background, poll}, self.spins, sequence, [&](const core::WaitOptions& options) {
        return hybrid::execute(self.levels, program, task, options);
    });
}

CallStatus tell_mismatch(HybridGroup& self, std::uint32_t call_kind, std::uint64_t sequence, std::uint64_t fingerprint,
                         nb::handle deadline, bool in_background, nb::handle poll) {
    const hybrid::Task task{nullptr, nullptr, call_kind, sequence, fingerprint, 0};
    return wait_without_gil({deadline, in_background, poll}, self.spins, sequence, [&](const core::WaitOptions& options) {
        return hybrid::tell_mismatch(self.levels, task, options);
    });
}

void add_program(nb::module_& module) {
    nb::class_<Program>(module, "Program", "One rank's part of a collective in two levels; a span is (space, begin, nbytes).")
        .def(nb::init<>())
        .def("add_intra_node", &add_intra_node, "kind"_a, "dtype"_a, "op"_a, "root"_a, "source"_a, "target"_a,
             "nbytes"_a, "in_place"_a, "Add a collective of the ranks of this host.")
        .def("add_inter_node", &add_inter_node, "plan"_a, "source"_a, "target"_a, "in_place"_a,
             "Add a collective of ranks on different hosts.")
        .def("add_copy", [](Program& self, const SpanTuple& source, const SpanTuple& target) {
            self.add(hybrid::Copy{span_of(source), span_of(target)});
        }, "source"_a, "target"_a, "Add a copy of as many bytes as the target has.")
        .def("add_to_float32", [](Program& self, std::size_t half, const SpanTuple& source, const SpanTuple& target) {
            self.add(hybrid::ToFloat32{dtype_of(half), span_of(source), span_of(target)});
        }, "half"_a, "source"_a, "target"_a, "Add a conversion of 16-bit floats.")
        .def("add_from_float32", [](Program& self, std::size_t half, const SpanTuple& source, const SpanTuple& target) {
            self.add(hybrid::FromFloat32{dtype_of(half), span_of(source), span_of(target)});
        }, "half"_a, "source"_a, "target"_a, "Add the rounding to 16-bit floats.")
        .def("add_divide", [](Program& self, std::size_t dtype, const SpanTuple& target, std::uint64_t divisor) {
            self.add(hybrid::Divide{dtype_of(dtype), span_of(target), divisor});
        }, "dtype"_a, "target"_a, "divisor"_a, "Add the division of a mean.");
}

}  // namespace

void add_hybrid(nb::module_& module) {
    add_program(module);
    nb::class_<HybridGroup, NativeGroup>(module, "HybridGroup", "Ranks that share memory inside hosts and use TCP between them.")
        .def(nb::init<nb::handle, nb::handle, std::vector<int>, std::uint64_t>(), "inter_node"_a, "intra_node"_a,
             "local"_a, "mismatch_fingerprint"_a)
        .def("execute", &execute, "program"_a, "source"_a.none(), "target"_a.none(), "call_kind"_a, "sequence"_a,
             "fingerprint"_a, "index"_a, "deadline"_a, "in_background"_a, "poll"_a,
             "Execute a program; return its status.")
        .def("tell_mismatch", &tell_mismatch, "call_kind"_a, "sequence"_a, "fingerprint"_a, "deadline"_a,
             "in_background"_a, "poll"_a, "Tell the ranks of this host of a mismatch that was found elsewhere.");
}

}  // namespace ferrodist::bind
