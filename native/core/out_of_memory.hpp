// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace ferrodist::core {

// Not enough memory, or not enough of what memory needs; says how much of what.
class OutOfMemory : public std::bad_alloc {
public:
    explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
    // For an array of this size.
    explicit OutOfMemory(std::size_t nbytes)
        : OutOfMemory("no memory for an array of " + std::to_string(nbytes) + " bytes (" +
                      std::to_string(nbytes >> 20) + " MiB)") {}
    const char* what() const noexcept override { return text_.c_str(); }

private:
    std::string text_;
};

}  // namespace ferrodist::core
