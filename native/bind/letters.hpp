// SPDX-License-Identifier: MIT OR Apache-2.0
// Point-to-point messages for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/shared_group.hpp"

namespace ferrodist::bind {

void add_letters(nanobind::module_& module, nanobind::class_<SharedGroup>& shared_group);

}  // namespace ferrodist::bind
