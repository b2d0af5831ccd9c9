// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

namespace ferrodist::core {

// The base of what others hold on to by its address: it is neither copied nor moved.
struct NonCopyable {
    NonCopyable() = default;
    NonCopyable(const NonCopyable&) = delete;
    NonCopyable& operator=(const NonCopyable&) = delete;
};

}  // namespace ferrodist::core
