// SPDX-License-Identifier: MIT OR Apache-2.0
// A test is a function with a name; a check that fails is told, and the test goes on: a rank that
// stopped in the middle would leave the others waiting.
#pragma once

#include <atomic>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace ferrodist::tests {

// How often something is done: less where every load and store is watched. See CMakeLists.txt.
constexpr std::size_t times(std::size_t count) {
    return (count + FERRODIST_TIMES_FEWER - 1) / FERRODIST_TIMES_FEWER;
}
constexpr bool is_sanitized = FERRODIST_TIMES_FEWER > 1;

inline std::atomic<int> num_failed{0};  // checks, of the whole program

// Tells of a check that failed.
void fail(const char* file, int line, const std::string& what);

template <class A, class B>
[[gnu::noinline]] void fail_equal(const char* file, int line, const char* what, const A& found, const B& expected) {
    std::ostringstream text;
    text << what << " is " << found << ", not " << expected;
    fail(file, line, text.str());
}

struct Test {
    const char* name;
    void (*run)();
};

std::vector<Test>& all_tests();

struct Registered {
    Registered(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};

}  // namespace ferrodist::tests

#define TEST(name)                                                   \
    static void name();                                              \
    static const ::ferrodist::tests::Registered name##_(#name, name); \
    static void name()

#define CHECK(condition)                                                \
    do {                                                                \
        if (!(condition)) {                                             \
            ::ferrodist::tests::fail(__FILE__, __LINE__, #condition);   \
        }                                                               \
    } while (false)

#define CHECK_EQUAL(found, expected)                                                             \
    do {                                                                                         \
        const auto found_ = (found);                                                             \
        const decltype(found_) expected_ = (expected);                                           \
        if (!(found_ == expected_)) {                                                            \
            ::ferrodist::tests::fail_equal(__FILE__, __LINE__, #found, found_, expected_);       \
        }                                                                                        \
    } while (false)

#define CHECK_THROWS(type, expression, words)                                                     \
    do {                                                                                          \
        try {                                                                                     \
            (void)(expression);                                                                   \
            ::ferrodist::tests::fail(__FILE__, __LINE__, #expression " throws no " #type);         \
        } catch (const type& error_) {                                                            \
            if (std::string(error_.what()).find(words) == std::string::npos) {                    \
                ::ferrodist::tests::fail(__FILE__, __LINE__, std::string("it says: ") + error_.what()); \
            }                                                                                     \
        }                                                                                         \
    } while (false)
