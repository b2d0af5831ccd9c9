// SPDX-License-Identifier: MIT OR Apache-2.0
// Request: one send or receive, from the moment it is posted until it is done or has failed.
//
// Who posts a request owns it, and keeps it and the memory it names until it is complete: until then
// the engine holds pointers to it, from then on none. `state` may be read by any thread at any time; what
// was found may be read once the request is complete.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/noncopyable.hpp"
#include "core/wait.hpp"

namespace ferrodist::core {

// A doubly linked list whose links are members of what it holds: nothing is allocated, and whatever is in
// it is taken out in constant time. It owns nothing.
template <class T>
struct Link {
    T* previous = nullptr;
    T* next = nullptr;
    bool is_linked = false;
};

template <class T, Link<T> T::*link>
class List {
public:
    bool empty() const { return first_ == nullptr; }
    T* front() const { return first_; }
    static T* after(const T& item) { return (item.*link).next; }
    static bool holds(const T& item) { return (item.*link).is_linked; }

    void push_back(T& item) { insert(item, last_, nullptr); }
    void insert_before(T* next, T& item) { insert(item, next == nullptr ? last_ : (next->*link).previous, next); }

    void erase(T& item) {
        Link<T>& own = item.*link;
        (own.previous == nullptr ? first_ : (own.previous->*link).next) = own.next;
        (own.next == nullptr ? last_ : (own.next->*link).previous) = own.previous;
        own = {};
    }

private:
    void insert(T& item, T* previous, T* next) {
        item.*link = {previous, next, true};
        (previous == nullptr ? first_ : (previous->*link).next) = &item;
        (next == nullptr ? last_ : (next->*link).previous) = &item;
    }

    T* first_ = nullptr;
    T* last_ = nullptr;
};

// What a transport keeps of a large message while its data is on its way.
struct Transfer {
    virtual ~Transfer() = default;
};

// Makes room for a message whose size only its sender knows, when it is matched.
struct Place {
    virtual ~Place() = default;
    // Never null, also for no bytes; null for a header that is none. Throws std::bad_alloc. Called with the lock of the
    // engine held, again if the message was withdrawn and another one matched.
    virtual std::byte* make(std::span<const std::byte> header, std::uint64_t nbytes) = 0;
};

class Request : core::NonCopyable {
public:
    enum class State : std::uint32_t {
        pending,  // nobody has taken part in it
        matched,  // a receive has its message, a send its receiver: its data is on its way
        done,
        failed,
    };

    // Pairs with the release in finish: what the call has found or written is seen.
    State state() const { return state_.load(std::memory_order_acquire); }
    bool is_complete() const { return state() >= State::done; }
    // Once it is complete.
    const Status& status() const { return status_; }

    // -- what is asked: set before it is posted ---------------------------------------------------

    int peer = -1;
    std::uint32_t tag = 0;
    const std::byte* source = nullptr;  // of a send
    std::byte* target = nullptr;        // of a receive
    std::size_t nbytes = 0;
    std::vector<std::byte> header;   // what that of a message must begin with for a receive to take it
    bool takes_shorter = false;      // also one with fewer rows than that, which begins as ArrayHeader says
    bool takes_object = false;       // a receive takes objects and nothing else, or anything but objects
    bool is_probe = false;           // takes nothing: it is done when there is a message that a receive would take
    bool keeps_header = false;       // whether `found` is set in any case
    Place* place = nullptr;          // of a receive that takes any message: sets target and nbytes
    std::int64_t deadline_ns = 0;    // when it fails by itself, also if nobody waits; 0: never
    std::int64_t last_deadline_ns = 0, stuck_ns = 0;  // as of WaitOptions; 0: the deadline is exact
    std::uint64_t token = 0;         // what Completions is told, not 0, if somebody wants to hear of it
    bool is_heard_if_done = false;   // whether that is so if it goes well, too
    bool is_unattended = false;      // whether somebody else than its owner has to make progress
    bool takes_any_source = false, takes_any_tag = false;

    // -- what is found: read when it is complete ----------------------------------------------------

    std::vector<std::byte> found;  // the header of a message that does not fit, or if it is to be kept
    int found_source = -1;
    std::uint32_t found_tag = 0;

    // -- the engine's, with its lock held -------------------------------------------------------------

    bool is_send = false;
    std::uint64_t number = 0;  // of a large message: by its sender
    std::uint64_t order = 0;   // of a receive among those posted
    int flight = -1;           // the rank among whose requests it stands; -1: a receive from any that nothing came for
    std::size_t room = 0;      // what nbytes was before a shorter message was matched
    std::unique_ptr<Transfer> transfer;
    Link<Request> match_link, flight_link;

    void set_pending() { state_.store(State::pending, std::memory_order_relaxed); }  // its owner sees it anyway
    void set_matched() { state_.store(State::matched, std::memory_order_relaxed); }  // a hint for others
    // The last that is done with it: from here on it is its owner's, who may end it at once.
    void finish(const Status& status) {
        status_ = status;
        // Pairs with the acquire in state.
        state_.store(status.failed() ? State::failed : State::done, std::memory_order_release);
    }

private:
    std::atomic<State> state_{State::done};  // until it is posted: nobody has to end it
    Status status_;
};

}  // namespace ferrodist::core
