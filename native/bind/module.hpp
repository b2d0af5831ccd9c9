// SPDX-License-Identifier: MIT OR Apache-2.0
// One function per folder of native/: each adds its names to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist::bind {

void add_hash(nanobind::module_& module);
void add_reduce(nanobind::module_& module);
void add_frames(nanobind::module_& module);
void add_hybrid(nanobind::module_& module);
void add_net(nanobind::module_& module);
void add_shm(nanobind::module_& module);

}  // namespace ferrodist::bind
