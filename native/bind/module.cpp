// SPDX-License-Identifier: MIT OR Apache-2.0
// ferrodist._native: what Python sees of native/. Only this folder knows Python; its functions
// check arguments, release the GIL where that pays, and call.
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "bind/arrays.hpp"
#include "bind/hooks.hpp"
#include "bind/python.hpp"
#include "bind/wait.hpp"
#include "core/hash.hpp"
#include "core/memory.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist::bind {

void set_memory_error(const std::bad_alloc& error, std::size_t nbytes) {
    const auto* const known = dynamic_cast<const core::OutOfMemory*>(&error);
    const std::string text = known != nullptr ? known->what()
                                              : "no memory for what a call on " + std::to_string(nbytes) +
                                                    " bytes needs besides its arrays";
    const auto asked = static_cast<unsigned long long>(known != nullptr ? known->nbytes() : 0);
    const nb::object made = nb::steal(try_python_with(hooks().out_of_memory, "sK", text.c_str(), asked));
    if (made.is_valid()) {
        raise(made.ptr());
    }
}

void raise_no_thread(const std::system_error& error) {
    throw_error(checked(call_python(hooks().no_thread, nb::str(error.what()).ptr())));
}

namespace {

void add_status(nb::module_& module) {
    nb::class_<CallStatus>(module, "Status", "How a call ended, due to which rank, and what ended its wait.")
        .def(nb::init<int, int, nb::object>(), "code"_a, "failed_rank"_a = -1, "error"_a.none() = nb::none())
        .def_ro("code", &CallStatus::code, "A StatusCode.")
        .def_ro("failed_rank", &CallStatus::failed_rank, "The rank it is due to, or -1.")
        .def_ro("error", &CallStatus::error, "The exception that ended a wait, or None.");
}

// -- hooks ---------------------------------------------------------------------------------------

constexpr std::pair<std::string_view, PyObject* Hooks::*> hook_names[] = {
    {"on_wait", &Hooks::on_wait},
    {"on_wait_end", &Hooks::on_wait_end},
    {"on_error", &Hooks::on_error},
    {"settle", &Hooks::settle},
    {"make_plan", &Hooks::make_plan},
    {"current_backend", &Hooks::current_backend},
    {"message_error", &Hooks::message_error},
    {"make_received", &Hooks::make_received},
    {"make_status", &Hooks::make_status},
    {"on_message_interrupt", &Hooks::on_message_interrupt},
    {"on_message_wait", &Hooks::on_message_wait},
    {"on_message_wait_end", &Hooks::on_message_wait_end},
    {"default_timeout", &Hooks::default_timeout},
    {"any_source", &Hooks::any_source},
    {"any_tag", &Hooks::any_tag},
    {"start_callbacks", &Hooks::start_callbacks},
    {"check_wait", &Hooks::check_wait},
    {"on_unasked_error", &Hooks::on_unasked_error},
    {"nested", &Hooks::nested},
    {"left_error", &Hooks::left_error},
    {"no_thread", &Hooks::no_thread},
    {"out_of_memory", &Hooks::out_of_memory},
};

void set_hooks(const nb::kwargs& given) {
    for (const auto [name, hook] : given) {
        const auto is_it = [&](const auto& known) { return nb::cast<std::string_view>(name) == known.first; };
        const auto* const found = std::find_if(std::begin(hook_names), std::end(hook_names), is_it);
        require(found != std::end(hook_names), "no such hook");
        hooks().*found->second = hook.inc_ref().ptr();
    }
}

thread_local bool is_marked = false;

// -- where a call was made -------------------------------------------------------------------------

PyTypeObject* site_type = nullptr;  // a named tuple of code and offset; kept for good
PyObject* folders = nullptr;        // a list: how the names of files begin that are not the user's

bool is_inside(PyCodeObject* code) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(folders); ++at) {
        if (PyUnicode_Tailmatch(code->co_filename, PyList_GET_ITEM(folders, at), 0, PY_SSIZE_T_MAX, -1) == 1) {
            return true;
        }
    }
    return false;
}

template <class T>
nb::object own(T* object) {
    return nb::steal(reinterpret_cast<PyObject*>(object));
}

// -- hashes ----------------------------------------------------------------------------------------

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

Hooks& hooks() {
    static Hooks set;
    return set;
}

bool is_progress_thread() { return is_marked; }

nb::object caller_site() {
    nb::object frame = own(PyThreadState_GetFrame(PyThreadState_Get()));
    while (frame.is_valid()) {
        auto* const found = reinterpret_cast<PyFrameObject*>(frame.ptr());
        nb::object code = own(PyFrame_GetCode(found));
        nb::object outer = is_inside(reinterpret_cast<PyCodeObject*>(code.ptr())) ? own(PyFrame_GetBack(found)) : nb::object();
        if (outer.is_valid()) {
            frame = std::move(outer);
            continue;
        }
        nb::object site = checked(site_type->tp_alloc(site_type, 2));
        PyTuple_SET_ITEM(site.ptr(), 0, code.release().ptr());
        PyTuple_SET_ITEM(site.ptr(), 1, PyLong_FromLong(PyFrame_GetLasti(found)));
        return site;
    }
    return nb::none();
}

}  // namespace ferrodist::bind

NB_MODULE(_native, module) {
    using namespace ferrodist;
    using namespace ferrodist::bind;
    module.doc() = "The native part of ferrodist: reduction kernels, hashes, shared memory and TCP.";
    // What init() made lives as long as the process; at its end that is no leak.
    nb::set_leak_warnings(false);
    load_numpy();
    add_status(module);
    module.def("hash_text", &hash_text, "text"_a, "Hash text to 64 bits.");
    module.def("fingerprint", &fingerprint, "numbers"_a,
               "Hash 64-bit numbers, signed or not, to 64 bits; order, length and sign matter.");
    module.def("set_hooks", &set_hooks, "Set what native code calls; every part sets those it has.");
    module.def("is_traced", &core::is_traced, "pidfd"_a, "Tell whether a debugger holds a process.");
    module.def("mark_progress_thread", [] {
        is_marked = true;
        core::HeldThread::exempt_this_thread();
    }, "Say that the calling thread runs callbacks, which must not communicate.");
    module.def("is_progress_thread", &is_progress_thread, "Tell whether the calling thread runs callbacks.");
    module.def("set_site", [](nb::handle type, nb::list prefixes) {
        site_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
        folders = prefixes.release().ptr();
    }, "site_type"_a, "folders"_a, "Set what caller_site() makes, and how the names of files begin that it leaves out.");
    module.def("caller_site", &caller_site, "Return the innermost place in the user's program that led here.");
    add_reduce(module);
    add_convert(module);
    add_work(module);
    add_calls(module);
    add_requests(module);
    add_groups(module);
    add_fast_path(module);
    add_shm(module);
    add_net(module);
    add_hybrid(module);
    add_frames(module);
}
