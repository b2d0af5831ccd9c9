// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs all tests, or those whose names begin with one of the arguments.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <iostream>

#include "check.hpp"

namespace ferrodist::tests {

std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

void fail(const char* file, int line, const std::string& what) {
    num_failed.fetch_add(1);
    std::cerr << std::string(file) + ":" + std::to_string(line) + ": " + what + "\n";  // one write
}

namespace {

constexpr unsigned longest_seconds = 60;  // of one test
const char* volatile running = "";

void give_up(int) {
    for (const char* part : {running, " takes too long\n"}) {
        (void)!write(STDERR_FILENO, part, std::strlen(part));
    }
    abort();
}

bool is_wanted(const Test& test, int num_names, char** names) {
    for (int i = 0; i < num_names; ++i) {
        if (std::strncmp(test.name, names[i], std::strlen(names[i])) == 0) {
            return true;
        }
    }
    return num_names == 0;
}

bool run(const Test& test) {
    const int before = num_failed;
    const auto start = std::chrono::steady_clock::now();
    running = test.name;
    alarm(longest_seconds);
    try {
        test.run();
    } catch (const std::exception& error) {
        fail(test.name, 0, error.what());
    }
    alarm(0);
    const auto passed = std::chrono::steady_clock::now() - start;
    std::cout << (num_failed == before ? "ok     " : "FAILED ") << test.name << " ("
              << std::chrono::duration_cast<std::chrono::milliseconds>(passed).count() << " ms)" << std::endl;
    return num_failed == before;
}

}  // namespace
}  // namespace ferrodist::tests

int main(int num_arguments, char** arguments) {
    using namespace ferrodist::tests;
    signal(SIGALRM, give_up);
    int num_run = 0, num_bad = 0;
    for (const Test& test : all_tests()) {
        if (is_wanted(test, num_arguments - 1, arguments + 1)) {
            ++num_run;
            num_bad += run(test) ? 0 : 1;
        }
    }
    std::cout << num_run << " tests, " << num_bad << " failed" << std::endl;
    return num_bad == 0 && num_run > 0 ? 0 : 1;
}
