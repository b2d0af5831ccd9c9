// SPDX-License-Identifier: MIT OR Apache-2.0
// Waits of ranks that share a core, and of those that do not.
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.hpp"
#include "net/link.hpp"
#include "ranks.hpp"
#include "core/spins.hpp"

namespace ferrodist::tests {
namespace {

using core::Spins;
using core::Word;
using Step = Spins::Step;

std::uint32_t shown(int cpu) { return static_cast<std::uint32_t>(cpu) + 1; }

// The spins of `rank` in a world whose ranks were seen on these CPUs.
struct Seen {
    std::vector<Word> words;
    Spins spins;

    Seen(const std::vector<std::uint32_t>& cpus, int rank, bool sees_all = true)
        : words(cpus.size()), spins(pointers(), rank, sees_all) {
        for (std::size_t i = 0; i < cpus.size(); ++i) {
            words[i] = cpus[i];
        }
    }
    std::vector<Word*> pointers() {
        std::vector<Word*> all;
        for (Word& word : words) {
            all.push_back(&word);
        }
        return all;
    }
};

long num_sleeps_of_thread() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

}  // namespace

TEST(who_waits_for_ranks_on_other_cores_spins_and_then_sleeps) {
    run_threads(1, [](int) {  // affinity is a thread's own
        const int cpu = allowed_cpus().front();
        stay_on({cpu});
        Seen seen({0, 0, shown(cpu + 1)}, 0);
        CHECK(seen.spins.next(0, 0) == Step::spin);
        CHECK_EQUAL(seen.words[0].load(), shown(cpu));
        CHECK(seen.spins.next(0, Spins::longest_ns - 1) == Step::spin);
        CHECK(seen.spins.next(0, Spins::longest_ns) == Step::sleep);
    });
}

TEST(after_long_waits_the_next_spin_less_until_one_is_short) {
    Seen seen({0}, 0);
    seen.spins.waited(2 * Spins::longest_ns - 1);
    CHECK(seen.spins.next(0, Spins::longest_ns - 1) == Step::spin);
    seen.spins.waited(2 * Spins::longest_ns);
    CHECK(seen.spins.next(0, Spins::longest_ns / 2) == Step::sleep);
    CHECK(seen.spins.next(0, Spins::longest_ns / 2 - 1) == Step::spin);
    for (int i = 0; i < 100; ++i) {
        seen.spins.waited(second);
    }
    CHECK(seen.spins.next(0, Spins::longest_ns / 10) == Step::sleep);
    CHECK(seen.spins.next(0, 0) == Step::spin);
    seen.spins.waited(1);
    CHECK(seen.spins.next(0, Spins::longest_ns - 1) == Step::spin);
}

TEST(who_shares_the_only_core_does_not_spin) {
    run_threads(1, [](int) {
        const int cpu = allowed_cpus().front();
        stay_on({cpu});
        for (const int rank : {0, 1}) {
            Seen seen({shown(cpu), shown(cpu)}, rank);
            CHECK(seen.spins.next(0, second) == Step::sleep);
            CHECK(seen.spins.next(second, second) == Step::yield);
            CHECK_EQUAL(sched_getcpu(), cpu);
        }
    });
}

TEST(who_does_not_see_where_all_ranks_are_yields) {
    Seen seen({0, 0, 0}, 0, false);
    CHECK(seen.spins.next(second, second) == Step::yield);
    CHECK(seen.spins.next(0, Spins::longest_ns) == Step::sleep);
}

TEST(of_two_ranks_on_a_core_the_later_one_moves_and_may_still_use_all_cores) {
    const std::vector<int> cpus = allowed_cpus();
    if (cpus.size() < 2) {
        return;
    }
    run_threads(1, [&](int) {
        stay_on({cpus[0]});
        Seen first({0, shown(cpus[0])}, 0);
        stay_on(cpus);
        CHECK(eventually([&] {  // the kernel may move a thread back at once
            Seen seen({0, 0}, 1);
            seen.words[0] = seen.spins.show_cpu();
            CHECK(seen.spins.next(second, second) == Step::spin);
            CHECK(allowed_cpus() == cpus);
            return seen.words[0] != seen.words[1];
        }));
        stay_on({cpus[0]});
        CHECK(first.spins.next(second, second) == Step::yield);
    });
}

TEST(a_rank_moves_only_to_a_core_without_ranks_and_not_again_and_again) {
    const std::vector<int> cpus = allowed_cpus();
    if (cpus.size() < 2) {
        return;
    }
    run_threads(1, [&](int) {
        stay_on({cpus[0], cpus[1]});
        Seen crowded({shown(cpus[0]), shown(cpus[1]), UINT32_MAX, 0}, 3);
        CHECK(crowded.spins.next(second, second) == Step::yield);
        Seen restless({0, 0}, 1);
        int num_moves = 0;
        for (std::int64_t now = second; now < 11 * second; now += 10 * millisecond) {
            restless.words[0] = restless.spins.show_cpu();
            num_moves += restless.spins.next(now, now) == Step::spin;
        }
        CHECK(num_moves > 0);
        CHECK(num_moves < 100);  // a thousand times it might have
    });
}

// Two ranks and a thread that computes share a core: a rank that yields would wait for time slices.
TEST(ranks_sleep_on_a_core_where_others_compute) {
    const int cpu = allowed_cpus().front(), num_rounds = 1000;  // of one try, which may be over within a time slice
    std::atomic<int> num_slept{0};
    std::atomic<bool> is_over{false};
    std::thread computing([&] {
        stay_on({cpu});
        while (!is_over.load(std::memory_order_relaxed)) {  // set when the ranks are through
        }
    });
    Host host(2);
    host.run([&](shm::Group& group) {
        stay_on({cpu});
        std::uint64_t sequence = 0;
        bool have_both_slept = false;
        for (int tries = 0; !have_both_slept && tries < 100; ++tries) {
            const long before = num_sleeps_of_thread();
            for (int round = 0; round < num_rounds; ++round) {
                CHECK_EQUAL(meet_all(group, ++sequence).code, core::StatusCode::done);
            }
            num_slept += num_sleeps_of_thread() - before > num_rounds / 4;
            CHECK_EQUAL(meet_all(group, ++sequence).code, core::StatusCode::done);
            have_both_slept = num_slept == 2;
            CHECK_EQUAL(meet_all(group, ++sequence).code, core::StatusCode::done);
            num_slept = 0;
            CHECK_EQUAL(meet_all(group, ++sequence).code, core::StatusCode::done);
        }
        CHECK(have_both_slept);
    });
    is_over.store(true, std::memory_order_relaxed);  // pairs with the load above
    computing.join();
}

TEST(ranks_that_share_a_core_take_turns) {
    const int cpu = allowed_cpus().front();
    Host host(3);
    host.run([&](shm::Group& group) {
        stay_on({cpu});
        for (std::uint64_t round = 1; round <= times(10'000); ++round) {
            CHECK_EQUAL(meet_all(group, round).code, core::StatusCode::done);
        }
    });
}

TEST(a_connection_of_one_host_is_known_by_its_addresses) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0), near = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    CHECK_EQUAL(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
    CHECK_EQUAL(::listen(listener, 1), 0);
    CHECK_EQUAL(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
    CHECK_EQUAL(::connect(near, reinterpret_cast<sockaddr*>(&address), size), 0);
    int pair[2];
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    const std::vector<std::byte> session(net::FrameKey::session_nbytes);
    CHECK(net::Link(near, session, 0, 1, 1000).is_on_this_host());
    CHECK(!net::Link(pair[0], session, 0, 1, 1000).is_on_this_host());
    CHECK(!net::Link(-1, session, 0, 0, 1000).is_on_this_host());
    ::close(pair[1]);
    ::close(listener);
}

}  // namespace ferrodist::tests
