// SPDX-License-Identifier: MIT OR Apache-2.0
// PlanCache: how the calls of a group are executed, made by Python when one is first needed.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "bind/collective_call.hpp"
#include "bind/gil.hpp"
#include "bind/hooks.hpp"

namespace ferrodist::bind {

template <class Plan>
class PlanCache {
public:
    // The plan of a collective; `from` makes one of what Python returns.
    template <class From>
    const Plan& find(const Collective& one, bool reproducible, PyObject* backend, const From& from) {
        const Key key{static_cast<int>(one.kind), static_cast<int>(one.dtype), static_cast<int>(one.op), one.root,
                      one.nbytes, one.in_place, reproducible};
        if (const auto found = plans_.find(key); found != plans_.end()) {
            return found->second;
        }
        const nanobind::object made = nanobind::steal(call_python_with(
            hooks().make_plan, "OiiiiKi", backend, static_cast<int>(one.kind), static_cast<int>(one.dtype),
            static_cast<int>(one.op), one.root, static_cast<unsigned long long>(one.nbytes),
            static_cast<int>(one.in_place)));
        if (!made.is_valid()) {
            throw nanobind::python_error();
        }
        if (plans_.size() >= most_plans) {
            plans_.clear();
        }
        return plans_.insert_or_assign(key, from(made)).first->second;
    }

private:
    // kind, dtype, op, root, bytes of one rank's array, in place, reproducible
    using Key = std::tuple<int, int, int, int, std::uint64_t, bool, bool>;
    static constexpr std::size_t most_plans = 256;

    std::map<Key, Plan> plans_;
};

}  // namespace ferrodist::bind
