// SPDX-License-Identifier: MIT OR Apache-2.0
// ProfilerEvent: shows a call in torch's profiler, if the program has imported torch and a profiler runs.
#pragma once

#include <nanobind/nanobind.h>

#include "core/noncopyable.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::bind {

// Lasts as long as the object, which lives and dies with the GIL. Without a profiler it costs two lookups. It may
// throw what Python raises, so a call makes it before its ticket.
class ProfilerEvent : core::NonCopyable {
public:
    explicit ProfilerEvent(shm::Kind kind) {
        if (PyObject* const module = profiler(); module != nullptr && is_on(module)) {
            begin(module, kind);
        }
    }
    ~ProfilerEvent() {
        if (event_.is_valid()) {
            end();
        }
    }

private:
    // The module of torch that knows; null as long as nobody has imported it. Borrowed.
    static PyObject* profiler() {
        static PyObject* found = nullptr;
        if (found == nullptr) {
            static PyObject* const name = PyUnicode_InternFromString("torch.autograd.profiler");
            found = Py_XNewRef(PyDict_GetItem(PyImport_GetModuleDict(), name));  // kept for good
        }
        return found;
    }
    static bool is_on(PyObject* module) {
        static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
        return PyDict_GetItem(PyModule_GetDict(module), name) == Py_True;
    }

    void begin(PyObject* module, shm::Kind kind) {
        namespace nb = nanobind;
        const nb::object label =
            nb::module_::import_("ferrodist.call").attr("Kind")(static_cast<int>(kind)).attr("label");
        nb::object event = nb::handle(module).attr("record_function")(nb::str("ferrodist:{}").format(label));
        event.attr("__enter__")();
        event_ = std::move(event);
    }

    void end() {
        namespace nb = nanobind;
        nb::error_scope kept;  // the call may have failed
        try {
            event_.attr("__exit__")(nb::none(), nb::none(), nb::none());
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("ferrodist: an event of torch's profiler");
        }
    }

    nanobind::object event_;
};

}  // namespace ferrodist::bind
