// SPDX-License-Identifier: MIT OR Apache-2.0
#include "core/forks.hpp"

#include <pthread.h>

#include <atomic>

namespace ferrodist::core {
namespace {

// Written only in a new child, where there is no other thread. Relaxed: pairs with nobody.
std::atomic<std::uint32_t> generation{0};

const int is_noted = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint32_t fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace ferrodist::core
