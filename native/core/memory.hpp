// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory: when there is none, how it is copied, and what is kept when it is given back. The first touch of fresh pages
// costs about as much as the collective that fills them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "reduce/reduce.hpp"

namespace ferrodist {

// -- copying memory that does not overlap --------------------------------------------------------

// From here on glibc may take "rep movsb", on some CPUs several times slower than vectors.
constexpr std::size_t largest_memcpy = 1024;

inline void copy_bytes(void* into, const void* from, std::size_t nbytes) {
    if (nbytes == 0) {
        return;  // the addresses may be null then
    }
    if (nbytes <= largest_memcpy) {
        std::memcpy(into, from, nbytes);
        return;
    }
    local_reduce(DType::uint8, Op::bor, into, &from, 1, nbytes, 1);  // of one operand: a copy
}

// -- warm memory: private memory for large results, kept for the next one when it is given back ---

// Below this, fresh memory is as quick.
constexpr std::size_t smallest_warm = std::size_t{1} << 20;

// Throws std::bad_alloc. Give the block back with release_warm.
void* take_warm(std::size_t nbytes);
void release_warm(void* block) noexcept;

// How much is kept for later, and never more than this.
std::size_t warm_nbytes();
constexpr std::size_t most_warm = std::size_t{256} << 20;

namespace core {

// -- memory for payloads, kept for the next one as well ------------------------------------------

struct Recycle {
    void operator()(std::byte* memory) const noexcept;
};
using Memory = std::unique_ptr<std::byte[], Recycle>;
Memory new_memory(std::size_t nbytes);

// -- when there is none --------------------------------------------------------------------------

// Not enough memory, or not enough of what memory needs; says how much of what.
class OutOfMemory : public std::bad_alloc {
public:
    explicit OutOfMemory(std::string text, std::size_t nbytes = 0) : text_(std::move(text)), nbytes_(nbytes) {}
    // For an array of this size.
    explicit OutOfMemory(std::size_t nbytes)
        : OutOfMemory("no memory for an array of " + std::to_string(nbytes) + " bytes (" +
                      std::to_string(nbytes >> 20) + " MiB)", nbytes) {}
    const char* what() const noexcept override { return text_.c_str(); }
    std::size_t nbytes() const { return nbytes_; }  // 0: the text says it

private:
    std::string text_;
    std::size_t nbytes_;
};

// Says whether there is memory; null outside of tests. Relaxed: the test and who allocates meet elsewhere. Pairs with
// the stores of tests.
inline std::atomic<bool (*)(std::size_t nbytes)> has_memory{nullptr};

// Throws std::bad_alloc where a test wants no memory to be left for an unexpected message.
inline void require_memory(std::size_t nbytes) {
    if (bool (*const check)(std::size_t) = has_memory.load(std::memory_order_relaxed); check != nullptr && !check(nbytes)) {
        throw std::bad_alloc();
    }
}

}  // namespace core
}  // namespace ferrodist
