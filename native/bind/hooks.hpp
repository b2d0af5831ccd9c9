// SPDX-License-Identifier: MIT OR Apache-2.0
// Hooks: what native code calls of Python while it runs a call. The backend is always the first argument.
// And the parts of the module, which see each other nowhere else.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist::bind {

struct Hooks {
    // (backend, site): about every 50 ms of a wait; may raise, which ends it. The site is where the call was made,
    // None if that is where this thread is.
    PyObject* on_wait = nullptr;
    PyObject* on_wait_end = nullptr;  // (backend): after a wait in which on_wait was called
    // (backend, status, failed rank, error, sequence, kind, dtype, shape, op, root, collectives begun, part of
    // a scatter that does not fit, x, out, site, timeout, reproducible): exchanges descriptors with all ranks where they differ, and raises
    PyObject* on_error = nullptr;
    // (backend, kind, sequence, error): a call ends with an error; aborts the group unless the other ranks know of it
    PyObject* settle = nullptr;
    // (backend, kind, dtype, op, root, nbytes, in place, in order): how a collective is executed that was not made before. In
    // two levels a Program; over TCP a Plan, and whether the result may lie where the input does.
    PyObject* make_plan = nullptr;
    PyObject* current_backend = nullptr;  // () -> the backend of the process, None before init()
    PyObject* out_of_memory = nullptr;    // (text, bytes asked for or 0) -> the error

    // -- messages ----------------------------------------------------------------------------------------
    // (backend, status, failed rank, header found, send cycle, header expected, (dst, src, tag, recv_tag), timeout, site)
    // -> the error; the site is None where this thread is
    PyObject* message_error = nullptr;
    // (bytes as a flat array, dtype, shape, kind) -> an array that native code does not make of a message
    PyObject* make_received = nullptr;
    // (backend, name, error): a call ends with an error; aborts the group if it is not one of ferrodist's
    PyObject* on_message_interrupt = nullptr;

    PyObject* make_status = nullptr;  // (source, tag, dtype, shape) -> the Status of a message

    // (what it returned before or None, backend, (dst, src, tag, recv_tag), site) -> a wait: about every 50 ms of it
    PyObject* on_message_wait = nullptr;
    PyObject* on_message_wait_end = nullptr;  // (what on_message_wait has returned): the call is over

    PyObject *any_source = nullptr, *any_tag = nullptr;  // what callers pass for these
    PyObject* default_timeout = nullptr;  // what callers pass for the backend's own

    // -- calls in flight -----------------------------------------------------------------------------------
    PyObject* start_callbacks = nullptr;   // (): something is in flight, and no thread is notified of what fails
    PyObject* no_thread = nullptr;         // (why) -> the error of a call in flight that no thread can be started for
    PyObject* check_wait = nullptr;        // (timeout) -> seconds
    PyObject* on_unasked_error = nullptr;  // (backend, work, error): nobody has asked for the error of a call
    PyObject* nested = nullptr;            // (backend, kind, sequence) -> the error of a wait inside an earlier call
    PyObject* left_error = nullptr;        // (backend, kind, sequence) -> the error of a call cut short by leaving
};

// Those of this process; set once, kept for good.
Hooks& hooks();

// Callbacks of a Work run on a progress thread, and must not communicate.
bool is_progress_thread();

// The innermost place in the user's program that led here: a Site of ferrodist.call.
nanobind::object caller_site();

// Each adds its names to the module.
void add_calls(nanobind::module_& module);
void add_convert(nanobind::module_& module);
void add_fast_path(nanobind::module_& module);
void add_frames(nanobind::module_& module);
void add_groups(nanobind::module_& module);
void add_hybrid(nanobind::module_& module);
void add_net(nanobind::module_& module);
void add_reduce(nanobind::module_& module);
void add_requests(nanobind::module_& module);
void add_shm(nanobind::module_& module);
void add_work(nanobind::module_& module);

}  // namespace ferrodist::bind
