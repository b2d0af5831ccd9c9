// SPDX-License-Identifier: MIT OR Apache-2.0
// Work: the native half of the handle of a call in flight, the same for messages and collectives.
//
// A Python class derives from it and from concurrent.futures.Future, whose state it makes only when somebody
// asks for it. Everything that most Works are asked for stands here: wait, result, exception, done. All of it
// is touched with the GIL held.
//
// A Work in flight is held by a registry, also if the program has dropped it: its arrays are in use. It leaves the
// registry when somebody has asked for its outcome, when the callbacks thread has heard of it, or, if it is
// done and nobody wants to know, some calls later.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "core/noncopyable.hpp"

namespace ferrodist::bind {

// A call in flight as its Work sees it.
class WorkRequest {
public:
    virtual ~WorkRequest() = default;

    virtual bool is_complete() = 0;  // keeps the GIL
    // Makes progress without waiting, and tells whether it is complete.
    virtual bool test() = 0;
    // The same, and may do a short call, which all ranks are about to do: that takes no longer than a thread for it.
    virtual bool meet() { return test(); }
    // Whether every call that it waits for is over: those of its group that were made before it.
    virtual bool is_next() { return true; }
    // Waits until it is complete, or a moment (0: none) has come; gives the exception that ended the wait, if any.
    virtual nanobind::object wait(std::int64_t end_ns) = 0;
    // Has Completions told of its end; false if it is complete, and nobody is told.
    virtual bool hear(std::uint64_t token) = 0;
    // Withdraws it, as if it had never been; false if others count on it, or it is complete.
    virtual bool cancel() { return false; }

    // Once it is complete.
    virtual bool has_failed() = 0;
    virtual nanobind::object result() = 0;
    virtual nanobind::object error() = 0;

    // A signal has ended a wait for it; gives the error to raise.
    virtual nanobind::object on_interrupt(nanobind::object error) = 0;
    virtual nanobind::object backend() = 0;
    virtual PyObject* group() const = 0;

    // Visits the Python objects that it holds and the program may have put into a cycle.
    virtual int traverse(visitproc, void*) const { return 0; }
};

// What a Work is called in logs: a collective has a kind and a number, a message peers and a tag.
struct CallFacts {
    int kind = -1;           // of a message
    int dst = -1, src = -1;  // -1: it does not send, or not receive
    std::int64_t number = 0;  // the sequence number, or the tag
};

struct WorkObject;

// A Work whose request is about to be posted. Unless it is released it takes all back.
class NewWork : core::NonCopyable {
public:
    NewWork(const CallFacts& facts, std::unique_ptr<WorkRequest> request);
    ~NewWork();

    // What Completions is told.
    std::uint64_t token() const;
    void set_number(std::uint64_t number);
    // The Work of a request that has been posted.
    PyObject* release();
    // The Work of a call that was done at once and gives None.
    PyObject* release_done();

private:
    void take_back();

    WorkObject* work_;
};

}  // namespace ferrodist::bind
