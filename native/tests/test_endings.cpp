// SPDX-License-Identifier: MIT OR Apache-2.0
// How a call ends when not all ranks do their part.
#include <algorithm>
#include <atomic>
#include <thread>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"
#include "shm/heartbeat.hpp"

namespace ferrodist::tests {
namespace {

using shm::Ending;
using shm::Group;
using shm::Kind;
using shm::Outcome;

void check_ending(const Ending& ending, Outcome outcome, int culprit) {
    CHECK_EQUAL(ending.outcome, outcome);
    CHECK_EQUAL(ending.culprit, culprit);
}

bool is_asleep_for(Group& group, int rank) {
    return eventually([&] { return group.words(rank).sleepers.load() > 0; });
}

}  // namespace

// -- differences -------------------------------------------------------------------------------------

TEST(whoever_differs_all_ranks_find_the_mismatch_and_go_on_in_step) {
    Host host(3);
    host.run([](Group& group) {
        std::uint64_t sequence = 0;
        Random random(1);
        for (int odd = 0; odd < 3; ++odd) {
            const std::uint64_t fingerprint = group.rank() == odd ? 7 : 5;
            const Ending ending = meet_all(group, ++sequence, very_long, fingerprint);
            CHECK_EQUAL(ending.outcome, Outcome::mismatch);
            CHECK_EQUAL(ending.culprit, group.rank() != odd ? odd : odd == 0 ? 1 : 0);
            for (const std::size_t nbytes : {100, 500'000}) {
                run_case(group, make_case(random, 3, Kind::allreduce, DType::float32, nbytes, Memory::any), ++sequence);
            }
        }
    });
}

TEST(a_difference_of_the_sequence_is_a_mismatch) {
    Host host(2);
    host.run([](Group& group) {
        CHECK_EQUAL(meet_all(group, group.rank() == 0 ? 5 : 6).outcome, Outcome::mismatch);
        CHECK_EQUAL(meet_all(group, 7).outcome, Outcome::done);
    });
}

TEST(calls_of_different_kinds_and_sizes_are_a_mismatch) {
    Host host(2);
    host.run([](Group& group) {
        std::vector<std::byte> memory(2 << 20);
        CountingWatch watch;
        for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) {
            shm::Task task{sequence % 2 == static_cast<std::uint64_t>(group.rank()) ? Kind::allreduce : Kind::all_to_all};
            task.nbytes = group.rank() == 0 ? 100 : 1 << 20;
            task.source = task.target = memory.data();
            task.in_place = true;
            task.fingerprint = static_cast<std::uint64_t>(task.kind);
            CHECK_EQUAL(shm::run(group, task, patience_of(watch, sequence)).outcome, Outcome::mismatch);
        }
    });
}

// -- deadlines and watches ---------------------------------------------------------------------------

TEST(who_waits_beyond_the_deadline_is_late) {
    Host host(2);
    const std::int64_t start = shm::now_ns();
    check_ending(meet_all(*host.group(0), 1, 120 * millisecond), Outcome::late, -1);
    const std::int64_t passed = shm::now_ns() - start;
    CHECK(passed >= 120 * millisecond);
    CHECK(passed < 5 * second);
    CHECK(host.group(0)->is_missing(1));
    CHECK(!host.group(0)->is_missing(0));
}

TEST(a_timeout_runs_from_when_the_wait_begins) {
    Host host(2);
    CountingWatch watch;
    const shm::Patience patience{&watch, 0, shm::no_spins, 1, 120 * millisecond};
    const std::int64_t start = shm::now_ns();
    check_ending(shm::run(*host.group(0), shm::Task{Kind::barrier}, patience), Outcome::late, -1);
    CHECK(shm::now_ns() - start >= 120 * millisecond);
    CHECK(shm::now_ns() - start < 5 * second);
    CHECK_EQUAL(watch.num_let_go, 1);
}

TEST(a_deadline_in_the_past_does_not_hurt_who_need_not_wait) {
    Host host(2);
    ActingWatch in_vain([] { return false; });
    CHECK_EQUAL(meet_all(*host.group(0), 1, in_vain).outcome, Outcome::interrupted);  // but it has posted
    CHECK_EQUAL(meet_all(*host.group(1), 1, -second).outcome, Outcome::done);
}

TEST(a_watch_ends_a_wait) {
    Host host(2);
    int num_looks = 0;
    ActingWatch watch([&] { return ++num_looks < 3; });
    check_ending(meet_all(*host.group(0), 1, watch), Outcome::interrupted, -1);
    CHECK_EQUAL(num_looks, 3);
}

// -- leaving and dying -------------------------------------------------------------------------------

TEST(who_waits_for_a_rank_that_leaves_has_lost_it) {
    for (const int leaver : {0, 1, 2}) {
        Host host(3);
        const std::int64_t start = shm::now_ns();
        host.run([&](Group& group) {
            if (group.rank() == leaver) {
                CHECK(is_asleep_for(group, leaver));
                group.leave("bye");
                CHECK(group.has_left());
                return;
            }
            check_ending(meet_all(group, 1), Outcome::lost, leaver);
            CHECK_EQUAL(group.departure_of(leaver).value_or("none"), "bye");
        });
        CHECK(shm::now_ns() - start < 5 * second);
    }
}

TEST(a_rank_that_left_before_the_call_is_lost) {
    Host host(2);
    CHECK(!host.group(0)->departure_of(1));
    host.group(1)->announce_closing();
    CHECK(!host.group(0)->is_gone(1));
    host.group(1)->leave(std::string(5000, 'x'));
    host.group(1)->leave("again");
    check_ending(meet_all(*host.group(0), 1), Outcome::lost, 1);
    CHECK_EQUAL(host.group(0)->departure_of(1).value_or(""), std::string(2048, 'x'));
}

TEST(a_rank_that_dies_is_lost_without_a_word) {
    Host host(3);
    host.run([&](Group& group) {
        if (group.rank() == 1) {
            CHECK(is_asleep_for(group, 1));
            host.kill(1);
            return;
        }
        check_ending(meet_all(group, 1), Outcome::lost, 1);
        CHECK(!group.departure_of(1));
    });
}

// FAULTS, row 26: gone counts only where something is still missing.
TEST(a_rank_that_has_done_its_part_may_go) {
    for (const bool says_goodbye : {true, false}) {
        Host host(3);
        ActingWatch in_vain([] { return false; });
        CHECK_EQUAL(meet_all(*host.group(2), 1, in_vain).outcome, Outcome::interrupted);  // it has posted
        says_goodbye ? host.group(2)->leave("") : host.kill(2);
        std::atomic<int> num_looks{0};
        run_threads(2, [&](int rank) {
            ActingWatch watch([&] { return ++num_looks > 0; });
            if (rank == 1) {  // comes when rank 0 has looked round twice
                CHECK(eventually([&] { return num_looks >= 2; }));
            }
            CHECK_EQUAL(meet_all(*host.group(rank), 1, watch).outcome, Outcome::done);
        });
        check_ending(meet_all(*host.group(0), 2), Outcome::lost, 2);
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

    shm::Ending receive(shm::Watch& watch, std::int64_t timeout_ns = very_long) {
        std::vector<std::byte> memory(nbytes);
        shm::Task task{Kind::broadcast};
        task.root = 1;
        task.target = memory.data();
        task.nbytes = nbytes;
        return shm::run(*host.group(0), task, patience_of(watch, 1, timeout_ns));
    }

private:
    static constexpr std::size_t nbytes = 64 << 10;
};

TEST(a_rank_that_goes_in_the_middle_of_its_stage_is_lost) {
    for (const bool says_goodbye : {true, false}) {
        HalfStaged half;
        says_goodbye ? half.host.group(1)->leave("") : half.host.kill(1);
        CountingWatch watch;
        check_ending(half.receive(watch), Outcome::lost, 1);
        CHECK(half.host.group(0)->is_missing(1));
    }
}

TEST(a_rank_that_stops_in_the_middle_of_its_stage_is_silent_or_makes_others_late) {
    CountingWatch watch;
    check_ending(HalfStaged().receive(watch, 100 * millisecond), Outcome::late, 1);
    HalfStaged half;
    shm::stop_beating(half.host.world(1)->peer(1).header().beat);
    check_ending(half.receive(watch), Outcome::silent, 1);
}

TEST(a_verdict_ends_the_wait_for_a_stage) {
    HalfStaged half;
    std::thread judge([&] {
        CHECK(eventually([&] { return half.host.group(1)->words(1).sleepers.load() == 1; }));
        half.host.group(1)->give_verdict(1, "enough");
    });
    CountingWatch watch;
    check_ending(half.receive(watch), Outcome::verdict, -1);
    judge.join();
}

TEST(the_end_of_a_stage_wakes_who_sleeps_for_it) {
    HalfStaged half;
    std::thread writer([&] {
        CHECK(eventually([&] { return half.host.group(1)->words(1).sleepers.load() == 1; }));
        half.host.group(1)->end_staging();
    });
    CountingWatch watch;
    CHECK_EQUAL(half.receive(watch).outcome, Outcome::done);
    writer.join();
}

// -- silence -----------------------------------------------------------------------------------------

TEST(a_rank_without_a_heartbeat_is_silent) {
    Host host(2, 150 * millisecond);
    shm::stop_beating(host.world(1)->peer(1).header().beat);
    const std::int64_t start = shm::now_ns();
    check_ending(meet_all(*host.group(0), 1), Outcome::silent, 1);
    CHECK(shm::now_ns() - start >= 150 * millisecond);
    CHECK(shm::now_ns() - start < 10 * second);
}

TEST(a_rank_that_is_slow_is_not_silent) {
    Host host(2, 400 * millisecond);
    std::atomic<int> num_looks{0};
    host.run([&](Group& group) {
        ActingWatch watch([&] { return ++num_looks > 0; });
        if (group.rank() == 1) {
            CHECK(eventually([&] { return num_looks >= 12; }));  // 50 ms each
        }
        CHECK_EQUAL(meet_all(group, 1, watch).outcome, Outcome::done);
    });
}

// -- nonsense ----------------------------------------------------------------------------------------

TEST(a_rank_that_posts_memory_beyond_its_arena_is_corrupt) {
    Host host(2);
    host.run([&](Group& group) {
        CountingWatch watch;
        if (group.rank() == 1) {
            shm::Slot& mine = group.slot(1);
            mine.sequence = 1;
            mine.fingerprint = 0;
            mine.source = group.world().arena().nbytes() - 1000;
            CHECK(!group.meet(patience_of(watch, 1)).failed());
            return;
        }
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::reduce};
        task.source = task.target = memory.data();
        task.nbytes = memory.size();
        check_ending(shm::run(group, task, patience_of(watch, 1)), Outcome::corrupt, 1);
    });
}

// Rank 1 says that it stages there, and rank 0 is to read it.
void check_stage_is_corrupt(std::size_t offset) {
    Host host(2);
    host.run([&](Group& group) {
        CountingWatch watch;
        if (group.rank() == 1) {
            group.slot(1).sequence = 1;
            group.slot(1).stage = offset;
            CHECK(!group.meet(patience_of(watch, 1)).failed());
            return;
        }
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::gather};
        task.source = memory.data();
        std::vector<std::byte> gathered(2 * memory.size());
        task.target = gathered.data();
        task.nbytes = memory.size();
        check_ending(shm::run(group, task, patience_of(watch, 1)), Outcome::corrupt, 1);
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
        CountingWatch watch;
        std::vector<std::byte> memory(100'000);
        shm::Task task{Kind::allreduce};
        task.source = task.target = memory.data();
        task.nbytes = memory.size();
        CHECK_THROWS(shm::OutOfMemory, shm::run(group, task, patience_of(watch, 1)), "no gap");
        CHECK_EQUAL(meet_all(group, 2).outcome, Outcome::done);
    });
}

// -- what is left ------------------------------------------------------------------------------------

// Others may still be writing into it: its memory must not become another array.
TEST(an_array_of_a_call_that_failed_is_left_alone_when_it_is_freed) {
    Host host(2);
    constexpr std::size_t nbytes = 100'000;
    HoldingWatch held;
    std::thread slow([&] {
        std::byte* const mine = host.arena(1).base() + host.arena(1).allocate(nbytes);
        std::fill_n(mine, nbytes, std::byte{0x22});
        shm::Task task{Kind::allreduce};
        task.source = task.target = mine;
        task.nbytes = nbytes;
        shm::run(*host.group(1), task, patience_of(held, 1, 2 * second));
    });
    held.is_here.pass();
    const std::size_t array = host.arena(0).allocate(nbytes);
    shm::Task task{Kind::allreduce};
    task.source = task.target = host.arena(0).base() + array;
    task.nbytes = nbytes;
    ActingWatch impatient([] { return false; });
    CHECK_EQUAL(shm::run(*host.group(0), task, patience_of(impatient, 1)).outcome, Outcome::interrupted);
    host.group(0)->give_verdict(1, "interrupted");
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
    HoldingWatch held;
    std::thread slow([&] {
        std::vector<std::byte> mine(nbytes, std::byte{0x22});  // private: rank 0 needs a stage for results
        shm::Task task{Kind::allreduce};
        task.source = task.target = mine.data();
        task.nbytes = nbytes;
        shm::run(*host.group(1), task, patience_of(held, 1, second));
    });
    held.is_here.pass();
    const std::size_t array = host.arena(0).allocate(nbytes);
    host.arena(0).allocate((4 << 20) - host.arena(0).allocated_nbytes());
    shm::Task task{Kind::allreduce};
    task.source = task.target = host.arena(0).base() + array;
    task.nbytes = nbytes;
    CountingWatch watch;
    CHECK_THROWS(shm::OutOfMemory, shm::run(*host.group(0), task, patience_of(watch, 1)), "no gap");
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
