// SPDX-License-Identifier: MIT OR Apache-2.0
// The thread that shows that a process is alive, and what forks do to it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.hpp"
#include "core/process.hpp"
#include "ranks.hpp"
#include "shm/world.hpp"

namespace ferrodist::tests {

TEST(a_heart_beats_until_it_is_stopped) {
    shm::Beat slow, quick;
    shm::start_beating(slow, very_long);
    shm::start_beating(quick, millisecond);
    CHECK(eventually([&] { return quick.count > 3; }));
    shm::stop_beating(quick);
    const std::uint64_t last = quick.count;
    shm::stop_beating(slow);
    CHECK_EQUAL(quick.count.load(), last);
    CHECK(slow.count > 0);
}

TEST(the_end_of_a_heartbeat_does_not_wait_for_another) {
    shm::Beat one, other;
    for (std::size_t i = 0; i < times(1000); ++i) {
        shm::start_beating(one, second);
        std::atomic<int> num_ready{0};
        std::atomic<bool> is_stopped{false};
        bool is_quick = true;
        run_threads(2, [&](int which) {
            ++num_ready;
            eventually([&] { return num_ready == 2; });
            if (which == 0) {
                shm::stop_beating(one);
                is_stopped = true;
                return;
            }
            shm::start_beating(other, second);
            const std::int64_t limit = core::now_ns() + second;
            while (!is_stopped && core::now_ns() < limit) {
                std::this_thread::yield();
            }
            is_quick = is_stopped;
            shm::stop_beating(other);
        });
        if (!is_quick) {
            CHECK(is_quick);
            return;
        }
    }
}

TEST(the_thread_that_is_held_for_longest_counts) {
    CHECK_EQUAL(core::longest_hold_ns(), 0);
    core::HeldThread first, second;
    first.note();
    CHECK(eventually([] { return core::longest_hold_ns() > 20 * millisecond; }));
    second.note();
    first.note();  // it is still the same wait
    CHECK(core::longest_hold_ns() > 20 * millisecond);
    first.let_go();
    CHECK(core::longest_hold_ns() < 20 * millisecond || is_sanitized);
    std::thread([] {
        core::HeldThread::exempt_this_thread();
        core::HeldThread third;
        third.note();
        CHECK(eventually([] { return core::longest_hold_ns() > 0; }));
    }).join();
    second.let_go();
    CHECK_EQUAL(core::longest_hold_ns(), 0);
}

TEST(of_ranks_that_are_threads_each_counts_its_own_held_threads) {
    const int first = 0, second = 0;
    core::HeldThread held;
    core::HeldThread::set_owner(&first);
    held.note();
    CHECK(eventually([&] { return core::longest_hold_ns(&first) > 20 * millisecond; }));
    CHECK_EQUAL(core::longest_hold_ns(&second), 0);
    CHECK(core::longest_hold_ns() > 20 * millisecond);
    std::thread([&] {
        core::HeldThread::set_owner(&second);
        core::HeldThread other;
        other.note();
        CHECK(eventually([&] { return core::longest_hold_ns(&second) > 0; }));
        CHECK(core::longest_hold_ns(&second) <= core::longest_hold_ns(&first));
    }).join();
    CHECK_EQUAL(core::longest_hold_ns(&second), 0);
    held.let_go();
    core::HeldThread::set_owner(nullptr);
    CHECK_EQUAL(core::longest_hold_ns(&first), 0);
}

TEST(a_heartbeat_shows_how_long_a_thread_is_held) {
    shm::Beat beat;
    shm::start_beating(beat, millisecond);
    {
        core::HeldThread held;
        held.note();
        CHECK(eventually([&] { return beat.held_ns > 20 * millisecond; }));
    }
    CHECK(eventually([&] { return beat.held_ns == 0; }));
    shm::stop_beating(beat);
}

TEST(a_forked_child_can_have_a_world_of_its_own) {
    if (is_sanitized) {
        return;  // ThreadSanitizer allows no threads in the child of a process that had some
    }
    Host parents(2);
    const int failed_before = num_failed;
    const pid_t child = fork();
    if (child == 0) {
        Host own(2);
        shm::Arena& arena = own.arena(0);
        const std::size_t before = arena.allocated_nbytes();
        arena.free(arena.allocate(100));
        CHECK_EQUAL(arena.allocated_nbytes(), before);
        const shm::Beat& beat = own.world(0)->peer(1).header().beat;
        const std::int64_t limit = core::now_ns() + second;
        while (beat.count < 2 && core::now_ns() < limit) {
            std::this_thread::yield();
        }
        CHECK(beat.count >= 2);
        _exit(num_failed == failed_before ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
}

}  // namespace ferrodist::tests
