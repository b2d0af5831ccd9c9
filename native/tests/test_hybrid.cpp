// SPDX-License-Identifier: MIT OR Apache-2.0
// Programs in two levels: ranks are threads with a mesh each, and share memory with the others of their host.
#include <array>
#include <cstring>
#include <string>

#include "check.hpp"
#include "hybrid/program.hpp"
#include "meshes.hpp"
#include "ranks.hpp"

namespace ferrodist::tests {
namespace {

using hybrid::Program;
using hybrid::Space;
using core::StatusCode;

constexpr std::uint64_t sequence = 1, fingerprint = 77, mismatch_fingerprint = 5;
constexpr hybrid::Span one_number_in{Space::input, 0, 8}, one_number_out{Space::output, 0, 8};

// Some ranks on each host; ranks are numbers in the group of all.
class TwoLevels {
public:
    explicit TwoLevels(std::vector<std::vector<int>> hosts) : hosts_(std::move(hosts)), meshes_(count(hosts_)) {
        for (const std::vector<int>& local : hosts_) {
            memories_.push_back(std::make_unique<Host>(static_cast<int>(local.size())));
            for (std::size_t i = 0; i < local.size(); ++i) {
                place_[static_cast<std::size_t>(local[i])] = {memories_.size() - 1, static_cast<int>(i)};
                meshes_.group(local[i]).leaves_deaths = true;
            }
        }
    }

    int size() const { return count(hosts_); }
    net::Group& group(int rank) { return meshes_.group(rank); }
    void kill_connections(int rank) { meshes_.kill(rank); }

    core::Status execute(int rank, const Program& program, std::int64_t& number, int index = 0,
                        std::uint64_t its_fingerprint = fingerprint) {
        const Wait wait;
        const hybrid::Task task{reinterpret_cast<std::byte*>(&number), reinterpret_cast<std::byte*>(&number),
                                static_cast<std::uint32_t>(shm::Kind::allreduce), sequence, its_fingerprint, index};
        return hybrid::execute(levels(rank), program, task, options_of(wait));
    }

    core::Status tell_mismatch(int rank) {
        const Wait wait;
        const auto kind = static_cast<std::uint32_t>(shm::Kind::allreduce);
        return hybrid::tell_mismatch(levels(rank), {nullptr, nullptr, kind, sequence, fingerprint, 0}, options_of(wait));
    }

    // What every rank does when ranks differ; returns what all have called.
    std::vector<std::string> exchange_descriptors(int rank) {
        const Wait wait;
        std::vector<std::string> all;
        const std::string mine = "rank " + std::to_string(rank);
        CHECK_EQUAL(group(rank).exchange_descriptors(sequence, bytes_of(mine), wait.options, all).code, StatusCode::done);
        return all;
    }

private:
    static int count(const std::vector<std::vector<int>>& hosts) {
        std::size_t total = 0;
        for (const auto& local : hosts) {
            total += local.size();
        }
        return static_cast<int>(total);
    }

    static core::WaitOptions options_of(const Wait& wait) {
        core::WaitOptions options = wait.options;
        options.sequence = sequence;
        return options;
    }

    hybrid::Levels levels(int rank) {
        const auto [host, local_rank] = place_[static_cast<std::size_t>(rank)];
        return {*memories_[host]->group(local_rank), group(rank), hosts_[host], mismatch_fingerprint};
    }

    const std::vector<std::vector<int>> hosts_;
    Meshes meshes_;
    std::vector<std::unique_ptr<Host>> memories_;
    std::array<std::pair<std::size_t, int>, 8> place_;
};

// One step between hosts: a number to a rank, or from one (-1: nobody).
std::shared_ptr<const net::Plan> step(int world, int rank, int to, int from) {
    std::vector<std::int32_t> ints = {static_cast<int>(shm::Kind::allreduce), world, rank, 0, 1, 0};
    ints.insert(ints.end(), {2, /* mine */ 0, 0, 0, -1, /* out */ 1, 0, 0, -1});
    ints.insert(ints.end(), {1, to});
    to >= 0 ? ints.insert(ints.end(), {1, 0}) : ints.insert(ints.end(), {0});
    ints.push_back(from);
    from >= 0 ? ints.insert(ints.end(), {1, 1}) : ints.insert(ints.end(), {0});
    ints.insert(ints.end(), {0, 0, 0});  // no work
    const std::array<std::uint64_t, 4> ranges{0, 8, 0, 8};
    const std::array<std::uint64_t, 1> scratch{0};
    return std::make_shared<net::Plan>(ints, ranges, scratch, net::Reduction{DType::int64, Op::sum, 1, false, {}},
                                       std::span<const int>{});
}

hybrid::IntraNode barrier() { return {shm::Kind::barrier, DType::uint8, Op::sum, 0, {}, {}, 0, false}; }

hybrid::IntraNode on_host(shm::Kind kind, bool has_source, bool has_target, Op op = Op::sum) {
    const hybrid::Span none;
    return {kind, DType::int64, op, 0, has_source ? one_number_in : none, has_target ? one_number_out : none, 8,
            has_source && has_target};
}

TEST(a_program_reduces_on_hosts_then_between_them) {
    TwoLevels levels({{0, 1}, {2, 3, 4}});
    run_threads(levels.size(), [&](int rank) {
        const bool is_leader = rank == 0 || rank == 2;
        const int other = rank == 0 ? 2 : 0;
        Program program;
        program.add(on_host(shm::Kind::reduce, true, is_leader));
        if (is_leader) {  // that of ranks 0 and 1 goes to the other host
            program.add(hybrid::InterNode{step(levels.size(), rank, rank == 0 ? other : -1, rank == 2 ? other : -1),
                                          one_number_in, one_number_out, true});
        }
        program.add(on_host(shm::Kind::broadcast, is_leader, true));
        std::int64_t number = rank + 1;
        CHECK_EQUAL(levels.execute(rank, program, number).code, StatusCode::done);
        CHECK_EQUAL(number, 3);  // ranks 0 and 1 together, on both hosts
    });
}

TEST(ranks_of_one_host_that_differ_find_out_there) {
    TwoLevels levels({{0, 1}, {2}});
    run_threads(levels.size(), [&](int rank) {
        Program program;
        program.add(barrier());
        program.add(hybrid::InterNode{step(levels.size(), rank, rank == 0 ? 2 : -1, rank == 2 ? 0 : -1), one_number_in,
                                      one_number_out, true});
        std::int64_t number = 0;
        const auto its_fingerprint = fingerprint + static_cast<std::uint64_t>(rank == 1);
        CHECK_EQUAL(levels.execute(rank, program, number, 0, its_fingerprint).code, StatusCode::mismatch);
        CHECK_EQUAL(levels.exchange_descriptors(rank).size(), 3u);
    });
}

// Ranks 2 and 4 are on one host. Rank 3 finds a mismatch when rank 0 has not sent to rank 4 yet, nor to rank 2 unless
// that one is through with the first collective of the call.
void find_a_mismatch(bool is_2_through) {
    TwoLevels levels({{0, 1}, {2, 4}, {3}});
    Gate through, mismatch_is_known;
    if (!is_2_through) {
        through.open();
    }
    run_threads(levels.size(), [&](int rank) {
        std::int64_t number = rank;
        const bool is_held_up = rank == 4 || (rank == 2 && !is_2_through);
        Program first, second;
        first.add(barrier());
        second.add(barrier());
        if (rank == 0) {
            for (const int to : is_2_through ? std::vector{2, 3} : std::vector{3}) {
                first.add(hybrid::InterNode{step(levels.size(), 0, to, -1), one_number_in, one_number_out, true});
            }
        } else if (rank >= 2) {
            first.add(hybrid::InterNode{step(levels.size(), rank, -1, 0), one_number_in, one_number_out, true});
        }
        if (rank < 2) {
            second.add(hybrid::InterNode{step(levels.size(), rank, -1, 4), one_number_in, one_number_out, true});
        }
        CHECK_EQUAL(levels.execute(rank, first, number).code, is_held_up ? StatusCode::mismatch : StatusCode::done);
        if (rank == 2) {
            through.open();
        }
        if (rank == 0) {  // holds rank 4 up until all others know
            CHECK(mismatch_is_known.pass());
        }
        if (rank == 3) {  // what it says reaches rank 2 sooner than what rank 0 has sent, if rank 2 is slow
            CHECK(through.pass());
            CHECK_EQUAL(levels.tell_mismatch(rank).code, StatusCode::mismatch);
        } else if (!is_held_up) {
            CHECK_EQUAL(levels.execute(rank, second, number, 1).code, StatusCode::mismatch);
        }
        if (rank == 4) {
            mismatch_is_known.open();
        }
        const std::vector<std::string> all = levels.exchange_descriptors(rank);
        CHECK_EQUAL(all.size(), 5u);
        CHECK_EQUAL(all.at(3), "rank 3");
    });
}

TEST(a_mismatch_reaches_ranks_of_a_host_at_different_stages) { find_a_mismatch(true); }

TEST(a_mismatch_reaches_ranks_of_a_host_at_the_same_stage) { find_a_mismatch(false); }

TEST(a_rank_lost_on_another_host_ends_waits_on_this_one) {
    TwoLevels levels({{0, 1}, {2}});
    run_threads(levels.size(), [&](int rank) {
        if (rank != 0) {
            return;  // rank 1 never comes, and rank 2 leaves
        }
        levels.group(2).leave("its end", 0);
        Program program;
        program.add(barrier());
        std::int64_t number = 0;
        const core::Status status = levels.execute(rank, program, number);
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, 2);
    });
}

}  // namespace
}  // namespace ferrodist::tests
