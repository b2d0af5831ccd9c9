// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/site.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

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

}  // namespace

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
        nb::object site = nb::steal(site_type->tp_alloc(site_type, 2));
        if (!site.is_valid()) {
            throw nb::python_error();
        }
        PyTuple_SET_ITEM(site.ptr(), 0, code.release().ptr());
        PyTuple_SET_ITEM(site.ptr(), 1, PyLong_FromLong(PyFrame_GetLasti(found)));
        return site;
    }
    return nb::none();
}

void add_site(nb::module_& module) {
    using namespace nb::literals;
    module.def("set_site", [](nb::handle type, nb::list prefixes) {
        site_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
        folders = prefixes.release().ptr();
    }, "site_type"_a, "folders"_a, "Set what caller_site() makes, and how the names of files begin that it leaves out.");
    module.def("caller_site", &caller_site, "Return the innermost place in the user's program that led here.");
}

}  // namespace ferrodist::bind
