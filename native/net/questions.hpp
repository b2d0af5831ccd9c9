// SPDX-License-Identifier: MIT OR Apache-2.0
// Text as bytes and back, and waits that look at nothing.
#pragma once

#include <string>
#include <string_view>

#include "net/mesh.hpp"

namespace ferrodist::net {

inline Bytes bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::string text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// How long a question to other ranks may take.
inline WaitOptions brief(std::int64_t ns) {
    static core::ProgressHook nobody;
    return {&nobody, core::now_ns() + ns, core::no_spins};
}

}  // namespace ferrodist::net
