// SPDX-License-Identifier: MIT OR Apache-2.0
// Site: where the user's program made a call.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist::bind {

// The innermost place in the user's program that led here: a Site of ferrodist.call.
nanobind::object caller_site();

void add_site(nanobind::module_& module);

}  // namespace ferrodist::bind
