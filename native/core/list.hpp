// SPDX-License-Identifier: MIT OR Apache-2.0
// A doubly linked list whose links are members of what it holds: nothing is allocated, and whatever is in
// it is taken out in constant time. It owns nothing.
#pragma once

namespace ferrodist::core {

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

}  // namespace ferrodist::core
