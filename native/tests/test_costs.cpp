// SPDX-License-Identifier: MIT OR Apache-2.0
// What a call costs: rounds, bytes that are staged, memory that is allocated. Not sanitized.
#include <cstdlib>
#include <new>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"

namespace {

thread_local std::size_t num_news = 0;

}  // namespace

void* operator new(std::size_t nbytes) {
    ++num_news;
    if (void* const memory = std::malloc(nbytes == 0 ? 1 : nbytes)) {
        return memory;
    }
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace ferrodist::tests {
namespace {

using shm::Group;
using shm::Kind;
using shm::Slot;

constexpr Kind kinds_with_data[] = {Kind::allreduce, Kind::broadcast, Kind::reduce,         Kind::all_gather,
                                    Kind::gather,    Kind::scatter,   Kind::reduce_scatter, Kind::all_to_all};

std::size_t cuts(std::size_t nbytes, std::size_t size) { return (nbytes + size - 1) / size; }

bool is_cut_by_rank(Kind kind) {
    return kind == Kind::scatter || kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}

// An even call of bytes, not in place.
Case plain_case(Kind kind, int world, std::size_t nbytes, bool is_shared) {
    Case one{kind, DType::boolean};
    one.count = nbytes;
    one.shared_sources.assign(static_cast<std::size_t>(world), is_shared);
    one.shared_targets = one.shared_sources;
    one.salt = nbytes;
    return one;
}

struct Cost {
    std::uint64_t num_rounds, sent_nbytes;
};

// What every rank pays for a call that comes after another of the same kind.
std::vector<Cost> costs_of(Host& host, const Case& one) {
    std::vector<Cost> costs(static_cast<std::size_t>(host.size()));
    host.run([&](Group& group) {
        const Cost before{group.num_rounds(), group.world().sent_nbytes};
        run_case(group, one, 1);
        costs[static_cast<std::size_t>(group.rank())] = {group.num_rounds() - before.num_rounds,
                                                         group.world().sent_nbytes - before.sent_nbytes};
    });
    return costs;
}

std::uint64_t total_sent(const std::vector<Cost>& costs) {
    std::uint64_t sum = 0;
    for (const Cost& cost : costs) {
        sum += cost.sent_nbytes;
    }
    return sum;
}

void check_rounds(Host& host, const Case& one, std::uint64_t expected) {
    for (const Cost& cost : costs_of(host, one)) {
        CHECK_EQUAL(one.text() + ": " + std::to_string(cost.num_rounds),
                    one.text() + ": " + std::to_string(expected));
    }
}

}  // namespace

TEST(a_small_call_is_one_round) {
    for (const int world : {1, 2, 3, 8}) {
        Host host(world);
        for (const Kind kind : kinds_with_data) {
            const std::size_t largest = Slot::capacity / (is_cut_by_rank(kind) ? static_cast<std::size_t>(world) : 1);
            for (const bool is_shared : {false, true}) {
                check_rounds(host, plain_case(kind, world, 0, is_shared), 1);
                check_rounds(host, plain_case(kind, world, 1, is_shared), 1);
                check_rounds(host, plain_case(kind, world, largest, is_shared), 1);
            }
        }
        check_rounds(host, plain_case(Kind::barrier, world, 0, false), 1);
    }
}

TEST(a_large_call_on_shared_memory_is_two_rounds) {
    for (const int world : {2, 3, 8}) {
        Host host(world);
        for (const Kind kind : kinds_with_data) {
            check_rounds(host, plain_case(kind, world, Slot::capacity + 1, true), 2);
            check_rounds(host, plain_case(kind, world, 1'000'000, true), 2);
        }
    }
}

TEST(a_large_call_on_private_memory_is_a_round_for_every_stage_full) {
    for (const std::size_t world : {2, 3, 8}) {
        Host host(static_cast<int>(world));
        for (const std::size_t nbytes : {Slot::capacity + 1, std::size_t{100'000}, std::size_t{3'000'000}}) {
            const std::size_t segment = Group::stage_nbytes / (64 * world) * 64 * world;
            const std::size_t piece = std::min(Group::piece_nbytes, Group::stage_nbytes / (world - 1) / 64 * 64);
            for (const Kind kind : kinds_with_data) {
                const std::size_t expected = kind == Kind::allreduce  ? cuts(nbytes, segment) + 1
                                             : is_cut_by_rank(kind) ? cuts(nbytes, piece)
                                                                      : cuts(nbytes, Group::piece_nbytes);
                check_rounds(host, plain_case(kind, static_cast<int>(world), nbytes, false), expected);
            }
        }
    }
}

TEST(private_memory_is_staged_once) {
    for (const std::uint64_t world : {2, 3, 8}) {
        Host host(static_cast<int>(world));
        for (const std::uint64_t nbytes : {std::uint64_t{100}, std::uint64_t{1'000'000}}) {
            for (const Kind kind : kinds_with_data) {
                const Case one = plain_case(kind, static_cast<int>(world), nbytes, false);
                const std::vector<Cost> costs = costs_of(host, one);
                std::uint64_t expected = 0;
                switch (kind) {
                    case Kind::allreduce:  // all but the own chunk, whose result is staged instead
                    case Kind::all_gather: expected = world * nbytes; break;
                    case Kind::broadcast: expected = nbytes; break;
                    case Kind::reduce:
                    case Kind::gather:
                    case Kind::scatter: expected = (world - 1) * nbytes; break;
                    default: expected = world * (world - 1) * nbytes;
                }
                CHECK_EQUAL(one.text() + ": " + std::to_string(total_sent(costs)),
                            one.text() + ": " + std::to_string(expected));
            }
        }
    }
}

TEST(shared_memory_is_not_staged) {
    for (const int world : {2, 3, 8}) {
        Host host(world);
        for (const Kind kind : kinds_with_data) {
            const Case one = plain_case(kind, world, 1'000'000, true);
            // An allreduce counts what it reduces for the others.
            CHECK_EQUAL(total_sent(costs_of(host, one)), kind == Kind::allreduce ? 1'000'000u : 0u);
        }
    }
}

TEST(a_call_allocates_nothing_when_it_is_not_the_first) {
    Host host(3);
    std::vector<std::byte> memory(3 * 2 * 3 * 300'000);
    host.run([&](Group& group) {
        std::byte* const mine = memory.data() + group.rank() * 2 * 3 * 300'000;
        std::byte* const shared = group.world().arena().base() + group.world().arena().allocate(6 * 300'000);
        std::uint64_t sequence = 0;
        std::size_t num_counted = 0;
        for (int round = 0; round < 50; ++round) {
            for (const Kind kind : kinds_with_data) {
                for (const std::size_t nbytes : {100, 300'000}) {
                    for (std::byte* const start : {mine, shared}) {
                        shm::Task task{kind};
                        task.source = start;
                        task.target = start + 3 * 300'000;
                        task.nbytes = nbytes;
                        CountingHook hook;
                        const std::size_t before = num_news;
                        const auto options = options_of(hook, ++sequence, very_long, group.spins());
                        CHECK(!shm::run(group, task, options).failed());
                        if (round > 0 && hook.num_polls == 0) {  // a wait of 50 ms makes a list
                            ++num_counted;
                            CHECK_EQUAL(num_news - before, 0u);
                        }
                    }
                }
            }
        }
        CHECK(num_counted > 0);
    });
}

}  // namespace ferrodist::tests
