// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory for payloads, kept for the next one when it is given back: fresh pages cost more than bytes.
#pragma once

#include <cstddef>
#include <memory>

namespace ferrodist::net {

struct Recycle {
    void operator()(std::byte* memory) const noexcept;
};
using Memory = std::unique_ptr<std::byte[], Recycle>;
Memory new_memory(std::size_t nbytes);

}  // namespace ferrodist::net
