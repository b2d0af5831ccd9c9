// SPDX-License-Identifier: MIT OR Apache-2.0
// ferrodist._native: what Python sees of native/. Only this folder knows Python; its functions
// check arguments, release the GIL where that pays, and call.
#include "bind/rooms.hpp"

NB_MODULE(_native, module) {
    module.doc() = "The native part of ferrodist: fold kernels and hashes.";
    ferrodist::bind::add_hash(module);
    ferrodist::bind::add_fold(module);
}
