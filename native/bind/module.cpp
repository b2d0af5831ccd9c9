// SPDX-License-Identifier: MIT OR Apache-2.0
// ferrodist._native: what Python sees of native/. Only this folder knows Python; its functions
// check arguments, release the GIL where that pays, and call.
#include "bind/arrays.hpp"
#include "bind/convert.hpp"
#include "bind/call_path.hpp"
#include "bind/hooks.hpp"
#include "bind/module.hpp"
#include "bind/site.hpp"
#include "bind/status.hpp"
#include "bind/work.hpp"

namespace {

void add_status(nanobind::module_& module) {
    using namespace nanobind::literals;
    using ferrodist::bind::CallStatus;
    nanobind::class_<CallStatus>(module, "Status", "How a call ended, due to which rank, and what ended its wait.")
        .def(nanobind::init<int, int, nanobind::object>(), "code"_a, "failed_rank"_a = -1,
             "error"_a.none() = nanobind::none())
        .def_ro("code", &CallStatus::code, "A StatusCode.")
        .def_ro("failed_rank", &CallStatus::failed_rank, "The rank it is due to, or -1.")
        .def_ro("error", &CallStatus::error, "The exception that ended a wait, or None.");
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The native part of ferrodist: reduction kernels, hashes, shared memory and TCP.";
    // What init() made lives as long as the process; at its end that is no leak.
    nanobind::set_leak_warnings(false);
    ferrodist::bind::load_numpy();
    add_status(module);
    ferrodist::bind::add_hash(module);
    ferrodist::bind::add_reduce(module);
    ferrodist::bind::add_convert(module);
    ferrodist::bind::add_hooks(module);
    ferrodist::bind::add_site(module);
    ferrodist::bind::add_work(module);
    ferrodist::bind::add_shm(module);
    ferrodist::bind::add_net(module);
    ferrodist::bind::add_hybrid(module);
    ferrodist::bind::add_frames(module);
}
