// SPDX-License-Identifier: MIT OR Apache-2.0
// How a call ends when not all ranks do their part.
#include <algorithm>
#include <atomic>
#include <thread>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"
#include "shm/world.hpp"

namespace ferrodist::tests {
namespace {

using core::Status;
using shm::Group;
using shm::Kind;
using core::StatusCode;

void check_status(const Status& status, StatusCode code, int failed_rank) {
    CHECK_EQUAL(status.code, code);
    CHECK_EQUAL(status.failed_rank, failed_rank);
}

bool is_asleep_for(Group& group, int rank) {
    return eventually([&] { return group.words(rank).sleepers.load() > 0; });
}

}  // namespace

// -- differences -------------------------------------------------------------------------------------

TEST(whichever_rank_differs_all_ranks_find_the_mismatch_and_go_on_in_step) {
    Host host(3);
    host.run([](Group& group) {
        std::uint64_t sequence = 0;
        Random random(1);
        for (int odd = 0; odd < 3; ++odd) {
            const std::uint64_t fingerprint = group.rank() == odd ? 7 : 5;
            const Status status = meet_all(group, ++sequence, very_long, fingerprint);
            CHECK_EQUAL(status.code, StatusCode::mismatch);
            CHECK_EQUAL(status.failed_rank, group.rank() != odd ? odd : odd == 0 ? 1 : 0);
            for (const std::size_t nbytes : {100, 500'000}) {
                run_case(group, make_case(random, 3, Kind::allreduce, DType::float32, nbytes, Memory::any), ++sequence);
            }
        }
    });
}

TEST(a_difference_of_the_sequence_is_a_mismatch) {
    Host host(2);
    host.run([](Group& group) {
        CHECK_EQUAL(meet_all(group, group.rank() == 0 ? 5 : 6).code, StatusCode::mismatch);
        CHECK_EQUAL(meet_all(group, 7).code, StatusCode::done);
    });
}

TEST(calls_of_different_kinds_and_sizes_are_a_mismatch) {
    Host host(2);
    host.run([](Group& group) {
        std::vector<std::byte> memory(2 << 20);
        CountingHook hook;
        for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) {
            shm::Task task{sequence % 2 == static_cast<std::uint64_t>(group.rank()) ? Kind::allreduce : Kind::all_to_all};
            task.nbytes = group.rank() == 0 ? 100 : 1 << 20;
            task.source = task.target = memory.data();
            task.in_place = true;
            task.fingerprint = static_cast<std::uint64_t>(task.kind);
            CHECK_EQUAL(shm::run(group, task, options_of(hook, sequence)).code, StatusCode::mismatch);
        }
    });
}

// -- deadlines and watches ---------------------------------------------------------------------------

TEST(who_waits_beyond_the_deadline_is_late) {
    Host host(2);
    const std::int64_t start = core::now_ns();
    check_status(meet_all(*host.group(0), 1, 120 * millisecond), StatusCode::late, -1);
    const std::int64_t passed = core::now_ns() - start;
    CHECK(passed >= 120 * millisecond);
    CHECK(passed < 5 * second);
    CHECK(host.group(0)->is_missing(1));
    CHECK(!host.group(0)->is_missing(0));
}

TEST(a_timeout_runs_from_when_the_wait_begins) {
    Host host(2);
    CountingHook hook;
    const core::WaitOptions options{&hook, 0, core::no_spins, 1, 120 * millisecond};
    const std::int64_t start = core::now_ns();
    check_status(shm::run(*host.group(0), shm::Task{Kind::barrier}, options), StatusCode::late, -1);
    CHECK(core::now_ns() - start >= 120 * millisecond);
    CHECK(core::now_ns() - start < 5 * second);
    CHECK_EQUAL(hook.num_let_go, 1);
}

TEST(a_deadline_in_the_past_does_not_hurt_who_need_not_wait) {
    Host host(2);
    ActingHook in_vain([] { return false; });
    CHECK_EQUAL(meet_all(*host.group(0), 1, in_vain).code, StatusCode::interrupted);  // but it has posted
    CHECK_EQUAL(meet_all(*host.group(1), 1, -second).code, StatusCode::done);
}

TEST(a_hook_ends_a_wait) {
    Host host(2);
    int num_polls = 0;
    ActingHook hook([&] { return ++num_polls < 3; });
    check_status(meet_all(*host.group(0), 1, hook), StatusCode::interrupted, -1);
    CHECK_EQUAL(num_polls, 3);
}

// -- leaving and dying -------------------------------------------------------------------------------

TEST(who_waits_for_a_rank_that_leaves_has_lost_it) {
    for (const int leaver : {0, 1, 2}) {
        Host host(3);
        const std::int64_t start = core::now_ns();
        host.run([&](Group& group) {
            if (group.rank() == leaver) {
                CHECK(is_asleep_for(group, leaver));
                group.leave("bye");
                CHECK(group.has_left());
                return;
            }
            check_status(meet_all(group, 1), StatusCode::lost, leaver);
            CHECK_EQUAL(group.leave_reason_of(leaver).value_or("none"), "bye");
        });
        CHECK(core::now_ns() - start < 5 * second);
    }
}

TEST(a_rank_that_left_before_the_call_is_lost) {
    Host host(2);
    CHECK(!host.group(0)->leave_reason_of(1));
    host.group(1)->announce_closing();
    CHECK(!host.group(0)->is_gone(1));
    host.group(1)->leave(std::string(5000, 'x'));
    host.group(1)->leave("again");
    check_status(meet_all(*host.group(0), 1), StatusCode::lost, 1);
    CHECK_EQUAL(host.group(0)->leave_reason_of(1).value_or(""), std::string(2048, 'x'));
}

TEST(a_rank_that_dies_is_lost_without_a_word) {
    Host host(3);
    host.run([&](Group& group) {
        if (group.rank() == 1) {
            CHECK(is_asleep_for(group, 1));
            host.kill(1);
            return;
        }
        check_status(meet_all(group, 1), StatusCode::lost, 1);
        CHECK(!group.leave_reason_of(1));
    });
}

// FAULTS, instruction 26: gone counts only where something is still missing.
TEST(a_rank_that_has_done_its_part_may_go) {
    for (const bool says_goodbye : {true, false}) {
        Host host(3);
        ActingHook in_vain([] { return false; });
        CHECK_EQUAL(meet_all(*host.group(2), 1, in_vain).code, StatusCode::interrupted);  // it has posted
        says_goodbye ? host.group(2)->leave("") : host.kill(2);
        std::atomic<int> num_polls{0};
        run_threads(2, [&](int rank) {
            ActingHook hook([&] { return ++num_polls > 0; });
            if (rank == 1) {  // comes when rank 0 has looked round twice
                CHECK(eventually([&] { return num_polls >= 2; }));
            }
            CHECK_EQUAL(meet_all(*host.group(rank), 1, hook).code, StatusCode::done);
        });
        check_status(meet_all(*host.group(0), 2), StatusCode::lost, 2);
    }
}

TEST(leaving_right_after_the_last_call_hurts_nobody) {
    for (std::size_t i = 0; i < times(300); ++i) {
        Host host(3, very_long, 4 << 20);
        host.run([&](Group& group) {
            Random random(i);
            for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
                const std::size_t nbytes = i % 2 == 0 ? 100 : 20'000;
                run_case(group, make_case(random, 3, Kind::allreduce, DType::int64, nbytes, Memory::any), sequence);
            }
            group.leave("");
        });
    }
}

// -- in the middle of a stage --------------------------------------------------------------------------

// Rank 1 has shown its slot and the first message of a broadcast, and does nothing more.
class HalfStaged {
public:
    Host host{2, 300 * millisecond};

    HalfStaged() {
        Group& root = *host.group(1);
        root.make_stage(nbytes);
        root.slot(1).sequence = 1;
        root.begin_staging();
        root.publish();
        root.show_staged(nbytes / 2);
    }

    core::Status receive(core::ProgressHook& hook, std::int64_t timeout_ns = very_long) {
        std::vector<std::byte> memory(nbytes);
        shm::Task task{Kind::broadcast};
        task.root = 1;
        task.target = memory.data();
        task.nbytes = nbytes;
        return shm::run(*host.group(0), task, options_of(hook, 1, timeout_ns));
    }

private:
    static constexpr std::size_t nbytes = 64 << 10;
};

TEST(a_rank_that_goes_in_the_middle_of_its_stage_is_lost) {
    for (const bool says_goodbye : {true, false}) {
        HalfStaged half;
        says_goodbye ? half.host.group(1)->leave("") : half.host.kill(1);
        CountingHook hook;
        check_status(half.receive(hook), StatusCode::lost, 1);
        CHECK(half.host.group(0)->is_missing(1));
    }
}

TEST(a_rank_that_stops_in_the_middle_of_its_stage_is_silent_or_makes_others_late) {
    CountingHook hook;
    check_status(HalfStaged().receive(hook, 100 * millisecond), StatusCode::late, 1);
    HalfStaged half;
    shm::stop_beating(half.host.world(1)->peer(1).header().beat);
    check_status(half.receive(hook), StatusCode::no_heartbeat, 1);
}

TEST(a_group_error_ends_the_wait_for_a_stage) {
    HalfStaged half;
    std::thread judge([&] {
        CHECK(eventually([&] { return half.host.group(1)->words(1).sleepers.load() == 1; }));
        half.host.group(1)->set_error(1, "enough");
    });
    CountingHook hook;
    check_status(half.receive(hook), StatusCode::group_error, -1);
    judge.join();
}

TEST(the_end_of_a_stage_wakes_who_sleeps_for_it) {
    HalfStaged half;
    std::thread writer([&] {
        CHECK(eventually([&] { return half.host.group(1)->words(1).sleepers.load() == 1; }));
        half.host.group(1)->end_staging();
    });
    CountingHook hook;
    CHECK_EQUAL(half.receive(hook).code, StatusCode::done);
    writer.join();
}

// -- silence -----------------------------------------------------------------------------------------

TEST(a_rank_without_a_heartbeat_is_silent) {
    Host host(2, 150 * millisecond);
    shm::stop_beating(host.world(1)->peer(1).header().beat);
    const std::int64_t start = core::now_ns();
    check_status(meet_all(*host.group(0), 1), StatusCode::no_heartbeat, 1);
    CHECK(core::now_ns() - start >= 150 * millisecond);
    CHECK(core::now_ns() - start < 10 * second);
}

TEST(a_rank_that_is_slow_is_not_silent) {
    Host host(2, 400 * millisecond);
    std::atomic<int> num_polls{0};
    host.run([&](Group& group) {
        ActingHook hook([&] { return ++num_polls > 0; });
        if (group.rank() == 1) {
            CHECK(eventually([&] { return num_polls >= 12; }));  // 50 ms each
        }
        CHECK_EQUAL(meet_all(group, 1, hook).code, StatusCode::done);
    });
}

// -- nonsense ----------------------------------------------------------------------------------------

TEST(a_rank_that_posts_memory_beyond_its_arena_is_corrupt) {
    Host host(2);
    host.run([&](Group& group) {
        CountingHook hook;
        if (group.rank() == 1) {
            shm::Slot& mine = group.slot(1);
            mine.sequence = 1;
            mine.fingerprint = 0;
            mine.source = group.world().arena().nbytes() - 1000;
            CHECK(!group.meet(options_of(hook, 1)).failed());
            return;
        }
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::reduce};
        task.source = task.target = memory.data();
        task.nbytes = memory.size();
        check_status(shm::run(group, task, options_of(hook, 1)), StatusCode::corrupt, 1);
    });
}

// Rank 1 says that it stages there, and rank 0 is to read it.
void check_stage_is_corrupt(std::size_t offset) {
    Host host(2);
    host.run([&](Group& group) {
        CountingHook hook;
        if (group.rank() == 1) {
            group.slot(1).sequence = 1;
            group.slot(1).stage = offset;
            CHECK(!group.meet(options_of(hook, 1)).failed());
            return;
        }
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::gather};
        task.source = memory.data();
        std::vector<std::byte> gathered(2 * memory.size());
        task.target = gathered.data();
        task.nbytes = memory.size();
        check_status(shm::run(group, task, options_of(hook, 1)), StatusCode::corrupt, 1);
    });
}

TEST(a_rank_that_stages_beyond_its_arena_is_corrupt) {
    const std::size_t arena_nbytes = Host(2).arena(1).nbytes();
    check_stage_is_corrupt(arena_nbytes - 99'999);
    check_stage_is_corrupt(0 - std::size_t{64});
    check_stage_is_corrupt(0);  // the header
}

TEST(a_rank_without_memory_for_a_stage_has_said_nothing) {
    Host host(2, very_long, 512 << 10);  // a stage takes 768 KB
    host.run([&](Group& group) {
        CountingHook hook;
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::allreduce};
        task.source = task.target = memory.data();
        task.nbytes = memory.size();
        CHECK_THROWS(shm::OutOfMemory, shm::run(group, task, options_of(hook, 1)), "no gap");
        CHECK_EQUAL(meet_all(group, 2).code, StatusCode::done);
    });
}

// -- what is left ------------------------------------------------------------------------------------

// Others may still be writing into it: its memory must not become another array.
TEST(an_array_of_a_call_that_failed_is_left_alone_when_it_is_freed) {
    Host host(2);
    constexpr std::size_t nbytes = 100'000;
    HoldingHook held;
    std::thread slow([&] {
        std::byte* const mine = host.arena(1).base() + host.arena(1).allocate(nbytes);
        std::fill_n(mine, nbytes, std::byte{0x22});
        shm::Task task{Kind::allreduce};
        task.source = task.target = mine;
        task.nbytes = nbytes;
        shm::run(*host.group(1), task, options_of(held, 1, 2 * second));
    });
    held.is_here.pass();
    const std::size_t array = host.arena(0).allocate(nbytes);
    shm::Task task{Kind::allreduce};
    task.source = task.target = host.arena(0).base() + array;
    task.nbytes = nbytes;
    ActingHook no_wait([] { return false; });
    CHECK_EQUAL(shm::run(*host.group(0), task, options_of(no_wait, 1)).code, StatusCode::interrupted);
    host.group(0)->set_error(1, "interrupted");
    host.arena(0).free(array);
    const std::size_t another = host.arena(0).allocate(nbytes);
    std::fill_n(host.arena(0).base() + another, nbytes, std::byte{0x11});
    held.may_go.open();
    slow.join();
    CHECK(another != array || is_all(host.arena(0).base() + another, nbytes, 0x11));
}

// A call that throws, for lack of memory for its stage, has posted its arrays too.
TEST(an_array_of_a_call_that_threw_is_left_alone_when_it_is_freed) {
    Host host(2, very_long, 4 << 20);
    constexpr std::size_t nbytes = 100'000;
    HoldingHook held;
    std::thread slow([&] {
        std::vector<std::byte> mine(nbytes, std::byte{0x22});  // private: rank 0 needs a stage for results
        shm::Task task{Kind::allreduce};
        task.source = task.target = mine.data();
        task.nbytes = nbytes;
        shm::run(*host.group(1), task, options_of(held, 1, second));
    });
    held.is_here.pass();
    const std::size_t array = host.arena(0).allocate(nbytes);
    host.arena(0).allocate((4 << 20) - host.arena(0).allocated_nbytes());
    shm::Task task{Kind::allreduce};
    task.source = task.target = host.arena(0).base() + array;
    task.nbytes = nbytes;
    CountingHook hook;
    CHECK_THROWS(shm::OutOfMemory, shm::run(*host.group(0), task, options_of(hook, 1)), "no gap");
    host.arena(0).free(array);
    try {
        const std::size_t another = host.arena(0).allocate(nbytes);
        std::fill_n(host.arena(0).base() + another, nbytes, std::byte{0x11});
        held.may_go.open();
        slow.join();
        CHECK(another != array || is_all(host.arena(0).base() + another, nbytes, 0x11));
    } catch (const shm::OutOfMemory&) {  // it is kept: as it should be
        held.may_go.open();
        slow.join();
    }
}

}  // namespace ferrodist::tests
