// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shm/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace ferrodist::shm {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t smallest_arena = std::size_t{64} << 20;
constexpr std::size_t smallest_checked = std::size_t{1} << 20;  // below it asking costs more

std::size_t round_up(std::size_t nbytes) { return (nbytes + page - 1) / page * page; }

std::string megabytes(std::size_t nbytes) {
    return std::to_string((nbytes + (1 << 20) - 1) >> 20) + " MiB";
}

// The first number of a file, none if there is no such file or it holds a word such as "max".
std::optional<std::size_t> read_number(const char* path) {
    std::ifstream file(path);
    std::size_t number = 0;
    return file >> number ? std::optional(number) : std::nullopt;
}

std::optional<std::size_t> read_memory_available() {
    std::ifstream file("/proc/meminfo");
    for (std::string word; file >> word;) {
        if (std::size_t kilobytes = 0; word == "MemAvailable:" && file >> kilobytes) {
            return kilobytes * 1024;
        }
    }
    return std::nullopt;
}

std::size_t container_memory_left() {
    struct Files {
        const char *limit, *used;
    };
    constexpr Files versions[] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
    };
    for (const Files& files : versions) {
        const auto limit = read_number(files.limit), used = read_number(files.used);
        if (limit && used) {
            return *limit > *used ? *limit - *used : 0;
        }
    }
    return std::numeric_limits<std::size_t>::max();
}

int make_memfd() {
    const int fd = memfd_create("ferrodist", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot make shared memory");
    }
    return fd;
}

// Fixes the size of a memfd for good.
void seal(int fd, std::size_t nbytes) {
    if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw std::system_error(errno, std::generic_category(), "cannot size shared memory");
    }
}

// How much address space one arena may take: pages cost only when they are touched.
std::size_t fitting_size() {
    const auto memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page;
    for (std::size_t size = std::max(memory, smallest_arena); size >= smallest_arena; size /= 2) {
        void* probe = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (probe != MAP_FAILED) {
            munmap(probe, size);
            return round_up(size);
        }
    }
    throw OutOfMemory("no room for an arena of " + megabytes(smallest_arena) +
                      " in the address space; look at 'ulimit -v'");
}

}  // namespace

std::size_t available_memory() {
    return std::min(read_memory_available().value_or(std::numeric_limits<std::size_t>::max()),
                    container_memory_left());
}

Mapping::Mapping(int fd) {
    struct stat facts {};
    if (fstat(fd, &facts) != 0) {
        throw std::system_error(errno, std::generic_category(), "cannot read the size of an arena");
    }
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw std::runtime_error("an arena is not sealed: its owner could shrink it");
    }
    nbytes_ = static_cast<std::size_t>(facts.st_size);
    void* address = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) {
        throw OutOfMemory("cannot map an arena of " + megabytes(nbytes_) + ": " +
                          std::strerror(errno) + "; look at 'ulimit -v'");
    }
    base_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() {
    if (base_ != nullptr) {
        munmap(base_, nbytes_);
    }
}

Arena::Arena(std::size_t reserved, std::size_t nbytes) {
    fd_ = make_memfd();
    try {
        seal(fd_, nbytes == 0 ? fitting_size() : round_up(nbytes));
        mapping_.emplace(fd_);
        gaps_.emplace(0, mapping_->nbytes());
        allocate(reserved);  // the first block: begins at 0
    } catch (...) {
        close(fd_);
        throw;
    }
}

Arena::~Arena() { close(fd_); }

std::size_t Arena::allocate(std::size_t nbytes, bool is_common) {
    const std::size_t size = round_up(std::max<std::size_t>(nbytes, 1));
    if (size >= smallest_checked && size > available_memory()) {
        throw OutOfMemory("shared memory of " + megabytes(size) + " was asked for, but only " +
                          megabytes(available_memory()) + " are available", nbytes);
    }
    const std::lock_guard lock(mutex_);
    const std::size_t offset = take_gap(size);
    int failed = 0;
    do {
        failed = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(size)) ? errno : 0;
    } while (failed == EINTR);
    if (failed != 0) {
        give_gap(offset, size);
        throw OutOfMemory("shared memory of " + megabytes(size) + " was refused: " + std::strerror(failed), nbytes);
    }
    blocks_.emplace(offset, Block{size, is_common});
    allocated_ += size;
    return offset;
}

void Arena::free(std::size_t offset) {
    if (birth_.is_of_ancestor()) {
        return;
    }
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(offset);
    if (found == blocks_.end() || found->second.is_pinned) {
        if (found != blocks_.end() && found->second.is_taken_back) {
            madvise(base() + offset, found->second.nbytes, MADV_DONTNEED);  // the address stays in use, the memory not
        }
        return;
    }
    const std::size_t size = found->second.nbytes;
    blocks_.erase(found);
    allocated_ -= size;
    // Failing to punch keeps the pages until the arena ends: no harm but memory.
    (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(size));
    give_gap(offset, size);
}

// Lock held.
std::map<std::size_t, Arena::Block>::iterator Arena::block_around(std::size_t offset) {
    const auto next = blocks_.upper_bound(offset);
    return next == blocks_.begin() ? blocks_.end() : std::prev(next);
}

void Arena::pin(std::size_t offset) {
    const std::lock_guard lock(mutex_);
    if (const auto found = block_around(offset); found != blocks_.end()) {
        found->second.is_pinned = true;
    }
}

void Arena::take_back(std::size_t offset) {
    const std::lock_guard lock(mutex_);
    const auto found = block_around(offset);
    if (found == blocks_.end() || found->second.is_common || found->second.is_taken_back) {
        return;
    }
    auto& [start, block] = *found;
    const bool is_too_large = block.nbytes >= smallest_checked && block.nbytes > available_memory();
    void* const fresh = is_too_large ? MAP_FAILED
                                     : mmap(nullptr, block.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
        throw OutOfMemory("no memory to take back " + megabytes(block.nbytes) + " from a rank that is lost");
    }
    copy_bytes(static_cast<std::byte*>(fresh), base() + start, block.nbytes);
    // In one step: other threads of this process find the bytes there all the time.
    if (mremap(fresh, block.nbytes, block.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, base() + start) == MAP_FAILED) {
        munmap(fresh, block.nbytes);
        throw OutOfMemory("cannot take back " + megabytes(block.nbytes) + " from a rank that is lost");
    }
    block.is_pinned = block.is_taken_back = true;  // its place in the file is still the lost rank's
    num_taken_back_.fetch_add(1, std::memory_order_release);  // pairs with find
    (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                    static_cast<off_t>(block.nbytes));
}

bool Arena::is_taken_back(std::size_t offset) const {
    const std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(offset);
    return next != blocks_.begin() && std::prev(next)->second.is_taken_back;
}

std::optional<std::size_t> Arena::find(const void* address, std::size_t nbytes) const {
    const auto* start = static_cast<const std::byte*>(address);
    const std::size_t offset = static_cast<std::size_t>(start - base());
    if (start < base() || offset >= this->nbytes() || nbytes > this->nbytes() - offset) {
        return std::nullopt;
    }
    // Pairs with the release in take_back.
    if (num_taken_back_.load(std::memory_order_acquire) != 0 && is_taken_back(offset)) {
        return std::nullopt;
    }
    return offset;
}

std::size_t Arena::num_blocks() const {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
}

std::size_t Arena::allocated_nbytes() const {
    const std::lock_guard lock(mutex_);
    return allocated_;
}

// First fit. Lock held.
std::size_t Arena::take_gap(std::size_t nbytes) {
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
        if (gap->second >= nbytes) {
            const auto [offset, size] = *gap;
            gaps_.erase(gap);
            if (size > nbytes) {
                gaps_.emplace(offset + nbytes, size - nbytes);
            }
            return offset;
        }
    }
    throw OutOfMemory("no gap of " + megabytes(nbytes) + " is left in an arena of " + megabytes(this->nbytes()), nbytes);
}

// Joins the gap with its neighbours. Lock held.
void Arena::give_gap(std::size_t offset, std::size_t nbytes) {
    auto next = gaps_.lower_bound(offset);
    if (next != gaps_.begin()) {
        if (const auto previous = std::prev(next); previous->first + previous->second == offset) {
            offset = previous->first;
            nbytes += previous->second;
            gaps_.erase(previous);
        }
    }
    if (next != gaps_.end() && offset + nbytes == next->first) {
        nbytes += next->second;
        gaps_.erase(next);
    }
    gaps_.emplace(offset, nbytes);
}

}  // namespace ferrodist::shm
