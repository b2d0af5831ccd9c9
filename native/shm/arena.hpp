// SPDX-License-Identifier: MIT OR Apache-2.0
// Arena: the memory a process shows to the other ranks of its host.
//
// A memfd of fixed, sparse size, sealed so that nobody can shrink it under the others. Blocks are
// taken with fallocate, so that lack of memory is an error here and never a SIGBUS later, and are
// punched out when freed. Nothing has a name in a file system: nothing is left behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "core/memory.hpp"
#include "core/process.hpp"

namespace ferrodist::shm {

using namespace core;

// A file descriptor mapped for reading and writing, unmapped at the end.
class Mapping {
public:
    // Refuses (std::runtime_error) a file that its owner could still shrink.
    explicit Mapping(int fd);
    Mapping(Mapping&& other) noexcept : base_(other.base_), nbytes_(other.nbytes_) {
        other.base_ = nullptr;
    }
    ~Mapping();

    std::byte* base() const { return base_; }
    std::size_t nbytes() const { return nbytes_; }

private:
    std::byte* base_ = nullptr;
    std::size_t nbytes_ = 0;
};

class Arena : core::NonCopyable {
public:
    // The first `reserved` bytes are the owner's own. 0 bytes in all means the machine's memory.
    explicit Arena(std::size_t reserved, std::size_t nbytes = 0);
    ~Arena();

    int fd() const { return fd_; }
    std::byte* base() const { return mapping_->base(); }
    std::size_t nbytes() const { return mapping_->nbytes(); }

    // Returns the offset of a zeroed block that begins on a page; throws OutOfMemory.
    // `is_common`: its users are processes that share it by design.
    std::size_t allocate(std::size_t nbytes, bool is_common = false);
    // Gives a block back. In a forked child it does nothing: the memory is the parent's.
    void free(std::size_t offset);
    // Keeps the block around an offset for good: others may still use it, after a call that failed.
    void pin(std::size_t offset);
    // Gives the block around an offset private pages with the same bytes, at the same address: what other processes write
    // to it is not seen here any more. It counts as memory outside the arena from now on. Memory that users share
    // (see is_common) stays as it is. Throws OutOfMemory.
    void take_back(std::size_t offset);
    // The offset of memory that lies in this arena.
    std::optional<std::size_t> find(const void* address, std::size_t nbytes) const;

    std::size_t num_blocks() const;
    std::size_t allocated_nbytes() const;

private:
    bool is_taken_back(std::size_t offset) const;
    std::size_t take_gap(std::size_t nbytes);
    void give_gap(std::size_t offset, std::size_t nbytes);

    int fd_ = -1;
    std::optional<Mapping> mapping_;
    mutable std::mutex mutex_;
    struct Block {
        std::size_t nbytes;
        bool is_common = false, is_pinned = false, is_taken_back = false;
    };
    std::map<std::size_t, Block>::iterator block_around(std::size_t offset);

    Birth birth_;
    std::map<std::size_t, std::size_t> gaps_;  // offset -> size, never adjacent
    std::map<std::size_t, Block> blocks_;      // by offset
    std::size_t allocated_ = 0;
    std::atomic<std::size_t> num_taken_back_{0};
};

// Memory the machine and the container can still give.
std::size_t available_memory();

}  // namespace ferrodist::shm
