// SPDX-License-Identifier: MIT OR Apache-2.0
// ferrodist._native: what Python sees of native/. Only this folder knows Python; its functions
// check arguments, release the GIL where that pays, and call.
#include "bind/arrays.hpp"
#include "bind/convert.hpp"
#include "bind/call_path.hpp"
#include "bind/hooks.hpp"
#include "bind/rooms.hpp"
#include "bind/site.hpp"
#include "bind/work.hpp"

NB_MODULE(_native, module) {
    module.doc() = "The native part of ferrodist: fold kernels, hashes, shared memory and TCP.";
    // What init() made lives as long as the process; at its end that is no leak.
    nanobind::set_leak_warnings(false);
    ferrodist::bind::load_numpy();
    ferrodist::bind::add_hash(module);
    ferrodist::bind::add_fold(module);
    ferrodist::bind::add_convert(module);
    ferrodist::bind::add_hooks(module);
    ferrodist::bind::add_site(module);
    ferrodist::bind::add_work(module);
    ferrodist::bind::add_shm(module);
    ferrodist::bind::add_net(module);
    ferrodist::bind::add_hybrid(module);
    ferrodist::bind::add_frames(module);
}
