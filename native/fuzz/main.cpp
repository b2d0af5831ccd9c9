// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs a fuzz target without a fuzzer: inputs made from a seed, or those in files.
//
//     fuzz_link SECONDS [SEED]     as many inputs as fit
//     fuzz_link FILE...            these again
//
// An input that kills the target is left in a file whose name is told.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes);

#if defined(__SANITIZE_ADDRESS__)
// No length that somebody else says may come to be that much memory.
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=64:hard_rss_limit_mb=4096"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:abort_on_error=1"; }
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace {

constexpr unsigned longest_seconds = 20;  // of one input
std::vector<std::uint8_t> input;
std::uint64_t seed = 1;

void keep_input() {
    const char name[] = "fuzz_input_that_failed";
    const int file = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    if (file >= 0 && write(file, input.data(), input.size()) == static_cast<ssize_t>(input.size())) {
        for (const char* part : {"the input is in ", name, "\n"}) {
            (void)!write(STDERR_FILENO, part, std::strlen(part));
        }
    }
}

void on_signal(int number) {
    keep_input();
    signal(number, SIG_DFL);
    raise(number == SIGALRM ? SIGABRT : number);
}

void watch_for_death() {
    signal(SIGALRM, on_signal);
    signal(SIGABRT, on_signal);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback(keep_input);
#else
    signal(SIGSEGV, on_signal);
#endif
}

void run() {
    alarm(longest_seconds);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    alarm(0);
}

// Makes the next input: bytes of any kind, or one that there was, changed here and there.
class Mutator {
public:
    void next() {
        if (kept_.size() < most || random_() % 4 == 0) {
            input.resize(random_() % 500);
            for (std::uint8_t& one : input) {
                one = byte();
            }
        } else {
            input = kept_[random_() % most];
            for (std::uint64_t i = 0; i <= random_() % 8; ++i) {
                change();
            }
        }
        kept_.size() < most ? kept_.push_back(input) : void(kept_[random_() % most] = input);
    }

private:
    std::uint8_t byte() { return static_cast<std::uint8_t>(random_() % 4 == 0 ? random_() % 4 : random_()); }

    void change() {
        if (input.empty()) {
            return input.push_back(byte());
        }
        const auto at = static_cast<std::ptrdiff_t>(random_() % input.size());
        const std::vector<std::uint8_t>& other = kept_[random_() % most];
        switch (random_() % 4) {
            case 0:
                input[static_cast<std::size_t>(at)] = byte();
                return;
            case 1:
                input.erase(input.begin() + at);
                return;
            case 2:
                input.insert(input.begin() + at, byte());
                return;
            default:  // goes on as another one does
                input.resize(static_cast<std::size_t>(at));
                if (other.size() > static_cast<std::size_t>(at)) {
                    input.insert(input.end(), other.begin() + at, other.end());
                }
        }
    }

    static constexpr std::size_t most = 200;
    std::mt19937_64 random_{seed};
    std::vector<std::vector<std::uint8_t>> kept_;
};

std::optional<std::uint64_t> number_of(const char* text) {
    std::uint64_t number = 0;
    const char* const end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, number);
    return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

void run_files(int count, char** names) {
    for (int i = 0; i < count; ++i) {
        std::ifstream file(names[i], std::ios::binary);
        input.assign(std::istreambuf_iterator<char>(file), {});
        run();
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    watch_for_death();
    const auto seconds = num_arguments > 1 ? number_of(arguments[1]) : std::optional<std::uint64_t>(10);
    if (!seconds) {
        run_files(num_arguments - 1, arguments + 1);
        return 0;
    }
    seed = num_arguments > 2 ? number_of(arguments[2]).value_or(1) : 1;
    Mutator mutator;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(*seconds);
    std::uint64_t count = 0;
    for (; std::chrono::steady_clock::now() < end; ++count) {
        mutator.next();
        run();
    }
    std::cout << count << " inputs from seed " << seed << std::endl;
    return count > 0 ? 0 : 1;
}
