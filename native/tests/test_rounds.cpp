// SPDX-License-Identifier: MIT OR Apache-2.0
// The rounds: what a rank writes into its slot or stage is what the others read, for ever.
#include <cstring>
#include <random>

#include "check.hpp"
#include "ranks.hpp"

namespace ferrodist::tests {
namespace {

constexpr int worlds[] = {1, 2, 3, 5, 8};

std::uint64_t said(int rank, std::uint64_t round) {
    return (round + 1) * 0x9E3779B97F4A7C15 ^ static_cast<std::uint64_t>(rank) << 32;
}

// Meets `count` times. Some ranks dawdle, so that now one and now another is the last.
void meet_often(shm::Group& group, std::size_t count) {
    CountingHook hook;
    const core::WaitOptions options = options_of(hook, 1, very_long, group.spins());
    const core::WaitOptions hasty{&hook, options.deadline_ns, core::no_spins, 1};
    std::mt19937 random(static_cast<unsigned>(group.rank()));
    for (std::uint64_t round = 0; round < count; ++round) {
        const std::uint64_t mine = said(group.rank(), round);
        shm::Slot& slot = group.slot(group.rank());
        slot.fingerprint = mine;
        std::memcpy(slot.data + shm::Slot::capacity - sizeof(mine), &mine, sizeof(mine));
        for (unsigned i = random() % 64 == 0 ? random() % 4096 : 0; i > 0; --i) {
            shm::pause();
        }
        const core::Status status = group.meet(random() % 8 == 0 ? hasty : options);
        CHECK_EQUAL(status.code, core::StatusCode::done);
        bool is_right = true;
        for (int rank = 0; rank < group.size(); ++rank) {
            const shm::Slot& theirs = group.slot(rank);
            std::uint64_t last = 0;
            std::memcpy(&last, theirs.data + shm::Slot::capacity - sizeof(last), sizeof(last));
            is_right &= theirs.fingerprint == said(rank, round) && last == said(rank, round);
        }
        CHECK(is_right);
        group.next_round();
        if (status.failed()) {
            return;
        }
    }
}

}  // namespace

TEST(every_rank_reads_what_the_others_wrote_in_this_round) {
    for (const int world : worlds) {
        Host host(world);
        const std::size_t count = times(100'000) / (world <= 2 ? 1 : static_cast<std::size_t>(world));
        host.run([&](shm::Group& group) {
            meet_often(group, count);
            CHECK_EQUAL(group.num_rounds(), count);
        });
    }
}

// A job of years: the number of a round comes back to 0. Adding one so often is quick only where the
// compiler makes one addition of it.
TEST(rounds_go_on_when_their_number_wraps) {
    if (is_sanitized) {
        return;
    }
    Host host(3);
    host.run([](shm::Group& group) {
        for (std::uint64_t i = 0; i < (std::uint64_t{1} << 32) - 1000; ++i) {
            group.next_round();
        }
        CHECK_EQUAL(group.round(), 0u - 1000);
        meet_often(group, 2000);
        CHECK_EQUAL(group.round(), 1000u);
    });
}

// Of any size, in any order, and now and then nothing: every end of the ring and of its halves is met.
TEST(a_stage_keeps_what_others_may_still_read) {
    for (const int world : {2, 3}) {
        Host host(world);
        host.run([](shm::Group& group) {
            CountingHook hook;
            const core::WaitOptions options = options_of(hook, 1, very_long, group.spins());
            std::mt19937 random(7);
            for (std::uint64_t round = 0; round < times(5000); ++round) {
                const std::size_t most = random() % 2 == 0 ? shm::Group::stage_nbytes : 100'000;
                const std::size_t nbytes = random() % 8 == 0 ? shm::Group::stage_nbytes : 16 + random() % (most - 15);
                const bool stages = random() % 8 != 0;
                const std::uint64_t mine = said(group.rank(), round);
                if (stages) {
                    std::byte* const stage = group.make_stage(nbytes);
                    std::memcpy(stage, &mine, 8);
                    std::memcpy(stage + nbytes - 8, &mine, 8);
                }
                CHECK(!group.meet(options).failed());
                for (int rank = 0; stages && rank < group.size(); ++rank) {
                    const std::byte* const theirs = group.stage(rank, group.round(), nbytes);
                    std::uint64_t first = 0, last = 0;
                    std::memcpy(&first, theirs, 8);
                    std::memcpy(&last, theirs + nbytes - 8, 8);
                    CHECK(first == said(rank, round) && last == first);
                }
                group.next_round();
            }
        });
    }
}

// One rank stages message by message, the others read each as soon as it is there, some of them asleep.
TEST(readers_follow_a_writer_through_its_stage) {
    constexpr std::size_t num_messages = 40, message = 1000;
    for (const int world : {2, 3}) {
        Host host(world);
        host.run([](shm::Group& group) {
            CountingHook hook;
            const core::WaitOptions options = options_of(hook, 1);
            const core::WaitOptions hasty{&hook, options.deadline_ns, core::no_spins, 1};
            std::mt19937 random(static_cast<unsigned>(group.rank()));
            for (std::uint64_t round = 0; round < times(2000); ++round) {
                const int writer = static_cast<int>(round) % group.size();
                const auto value = static_cast<int>(said(writer, round) % 251);
                if (group.rank() == writer) {
                    std::byte* const stage = group.make_stage(num_messages * message);
                    group.begin_staging();
                    group.publish();
                    for (std::size_t i = 0; i < num_messages; ++i) {
                        std::memset(stage + i * message, value, message);
                        group.show_staged((i + 1) * message);
                    }
                    group.end_staging();
                    CHECK(!group.await_others(options).failed());
                } else {
                    CHECK(!group.meet(options).failed());
                    const std::byte* const stage = group.stage(writer, group.round(), num_messages * message);
                    for (std::size_t done = 0; done < num_messages * message; done += message) {
                        const bool is_hasty = random() % 64 == 0;
                        CHECK(!group.await_staged(writer, done + message, is_hasty ? hasty : options).failed());
                        CHECK(is_all(stage + done, message, value));
                    }
                    CHECK(!group.is_missing(group.rank()));
                }
                group.next_round();
            }
        });
    }
}

TEST(who_comes_last_is_what_the_others_waited_for) {
    Host host(3);
    host.run([&](shm::Group& group) {
        if (group.rank() == 2) {  // comes when both others sleep for it
            CHECK(eventually([&] { return group.words(2).sleepers.load() == 2; }));
        }
        CHECK_EQUAL(meet_all(group, 1).code, core::StatusCode::done);
    });
    const auto waited = [&](std::size_t rank, std::size_t for_rank) {
        return host.group(0)->layout().waited(rank, for_rank).load();
    };
    CHECK(waited(0, 2) > 0);
    CHECK(waited(1, 2) > 0);
    CHECK_EQUAL(waited(2, 0) + waited(2, 1), 0u);
}

}  // namespace ferrodist::tests
