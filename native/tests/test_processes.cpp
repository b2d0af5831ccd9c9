// SPDX-License-Identifier: MIT OR Apache-2.0
// Ranks as processes: arenas lie at different addresses, and ranks die.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "check.hpp"
#include "collective_cases.hpp"
#include "ranks.hpp"
#include "shm/split.hpp"

namespace ferrodist::tests {
namespace {

using core::Status;
using shm::Group;
using shm::Kind;
using core::StatusCode;

constexpr int most_ranks = 8;
constexpr std::int64_t soon = is_sanitized ? 5 * second : second;

// What all processes see.
struct Board {
    std::atomic<int> pids[most_ranks], fds[most_ranks];
    std::atomic<int> num_arenas, num_mapped, num_calls;
    std::atomic<std::int64_t> killed_ns;
};

using Work = std::function<void(const std::shared_ptr<Group>&, Board&)>;

class Family {
public:
    // Starts one process per rank, each of which does `work` in the group of all.
    Family(int size, const Work& work, std::int64_t heartbeat_timeout_ns = very_long) : size_(size) {
        void* const memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        board_ = new (memory) Board{};
        for (int rank = 0; rank < size; ++rank) {
            CHECK(pipe(lifelines_[static_cast<std::size_t>(rank)].data()) == 0);
        }
        for (int rank = 0; rank < size; ++rank) {
            const pid_t pid = fork();
            if (pid == 0) {
                live(rank, work, heartbeat_timeout_ns);
            }
            board_->pids[rank] = pid;
        }
        for (int rank = 0; rank < size; ++rank) {
            close(lifelines_[static_cast<std::size_t>(rank)][0]);
            close(lifelines_[static_cast<std::size_t>(rank)][1]);
        }
    }
    ~Family() {
        for (int rank = 0; rank < size_; ++rank) {
            int status = -1;
            waitpid(board_->pids[rank], &status, 0);
            CHECK_EQUAL(status, is_killed_[static_cast<std::size_t>(rank)] ? SIGKILL : 0);
        }
        munmap(board_, sizeof(Board));
    }
    Family(const Family&) = delete;
    Family& operator=(const Family&) = delete;

    Board& board() { return *board_; }
    void kill(int rank) {
        is_killed_[static_cast<std::size_t>(rank)] = true;
        board_->killed_ns = core::now_ns();
        ::kill(board_->pids[rank], SIGKILL);
    }
    void signal(int rank, int number) { ::kill(board_->pids[rank], number); }

private:
    // The whole life of one rank. Only it has the end of its lifeline that says that it lives.
    [[noreturn]] void live(int rank, const Work& work, std::int64_t heartbeat_timeout_ns) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(50);
        num_failed = 0;  // of its own
        try {
            for (int other = 0; other < size_; ++other) {
                if (other != rank) {
                    close(lifelines_[static_cast<std::size_t>(other)][1]);
                }
            }
            work(join(rank, heartbeat_timeout_ns), *board_);
        } catch (const std::exception& error) {
            fail("rank", rank, error.what());
        }
        _exit(num_failed == 0 ? 0 : 1);
    }

    std::shared_ptr<Group> join(int rank, std::int64_t heartbeat_timeout_ns) {
        const std::size_t block = shm::GroupLayout::nbytes(static_cast<std::size_t>(size_));
        const auto arena = shm::make_arena(rank == 0 ? block : 0, 64 << 20);
        board_->fds[rank] = arena->fd();
        board_->pids[rank] = getpid();
        ++board_->num_arenas;
        CHECK(eventually([&] { return board_->num_arenas == size_; }));
        std::vector<shm::Peer> peers;
        for (int peer = 0; peer < size_; ++peer) {
            peers.push_back(peer == rank ? shm::Peer{arena->base(), arena->nbytes(), -1, nullptr} : map(peer));
        }
        ++board_->num_mapped;
        CHECK(eventually([&] { return board_->num_mapped == size_; }));
        const auto world = std::make_shared<shm::World>(rank, arena, std::move(peers), 20 * millisecond, heartbeat_timeout_ns);
        return first_group(world);
    }

    shm::Peer map(int peer) {
        const std::string path = "/proc/" + std::to_string(board_->pids[peer]) + "/fd/" + std::to_string(board_->fds[peer]);
        const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        const auto mapping = std::make_shared<const shm::Mapping>(fd);
        close(fd);
        return {mapping->base(), mapping->nbytes(), lifelines_[static_cast<std::size_t>(peer)][0], mapping};
    }

    const int size_;
    Board* board_;
    std::array<std::array<int, 2>, most_ranks> lifelines_{};
    std::array<bool, most_ranks> is_killed_{};
};

// Calls until one fails.
Status call_for_ever(Group& group, Board& board, Kind kind, Memory memory) {
    Random random(1);
    std::vector<std::byte> heap(8 << 20);
    std::byte* const shared = group.world().arena().base() + group.world().arena().allocate(heap.size());
    std::byte* const start = memory == Memory::all_shared ? shared : heap.data();
    for (std::uint64_t sequence = 1;; ++sequence) {
        CountingHook hook;
        shm::Task task{kind, DType::float32};
        task.source = start;
        task.target = start + heap.size() / 2;
        task.nbytes = heap.size() / 2 / (kind == Kind::allreduce ? 1 : static_cast<std::size_t>(group.size()));
        const Status status = shm::run(group, task, options_of(hook, sequence));
        ++board.num_calls;
        if (status.failed()) {
            return status;
        }
    }
}

void check_killing(int victim, Kind kind, Memory memory) {
    Family family(3, [=](const std::shared_ptr<Group>& group, Board& board) {
        const Status status = call_for_ever(*group, board, kind, memory);
        CHECK_EQUAL(status.code, StatusCode::lost);
        CHECK_EQUAL(status.failed_rank, victim);
        CHECK(core::now_ns() - board.killed_ns < soon);
    });
    CHECK(eventually([&] { return family.board().num_calls >= 20; }));
    family.kill(victim);
}

}  // namespace

TEST(processes_get_the_right_results) {
    for (const int world : {1, 2, 3, 5}) {
        Family family(world, [=](const std::shared_ptr<Group>& group, Board&) {
            Random random(static_cast<unsigned>(world));
            for (std::uint64_t sequence = 1; sequence <= times(400); ++sequence) {
                const auto kind = static_cast<Kind>(random() % num_kinds);
                const DType dtype = case_dtypes[random() % std::size(case_dtypes)];
                const std::size_t largest = random() % 4 == 0 ? 600'000 : 6'000;
                if (run_case(*group, make_case(random, world, kind, dtype, random() % largest, Memory::any), sequence)
                        .failed()) {
                    return;
                }
            }
        });
    }
}

TEST(processes_split_off_groups) {
    Family family(3, [](const std::shared_ptr<Group>& group, Board&) {
        const std::size_t before = group->world().arena().allocated_nbytes();
        for (std::uint64_t id = 1; id <= times(100); ++id) {
            CountingHook hook;
            shm::Split split(group, {2, 0, 1}, id);
            CHECK_EQUAL(split.wait(options_of(hook, 0)).code, StatusCode::done);
            Random random(id);
            run_case(*split.group(), make_case(random, 3, Kind::allreduce, DType::int64, 10'000, Memory::any), 1);
        }
        // All have dropped theirs before anybody comes here, and have swept before the next.
        for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
            CHECK_EQUAL(meet_all(*group, sequence).code, StatusCode::done);
            group->world().sweep();
        }
        CHECK_EQUAL(group->world().arena().allocated_nbytes(), before);
    });
}

TEST(who_survives_a_killed_rank_knows_which_it_was) {
    for (const int victim : {0, 1, 2}) {
        check_killing(victim, Kind::allreduce, Memory::all_private);
    }
    check_killing(1, Kind::allreduce, Memory::all_shared);
    check_killing(2, Kind::all_to_all, Memory::all_private);
}

TEST(a_stopped_process_is_silent) {
    Family family(2, [](const std::shared_ptr<Group>& group, Board& board) {
        const Status status = call_for_ever(*group, board, Kind::allreduce, Memory::all_private);
        if (group->rank() == 0) {
            CHECK_EQUAL(status.code, StatusCode::no_heartbeat);
            CHECK_EQUAL(status.failed_rank, 1);
            CHECK(group->set_error(1, "silent"));
            kill(board.pids[1], SIGCONT);
        } else {
            // The second where it was stopped between two calls.
            CHECK(status.code == StatusCode::group_error || status.code == StatusCode::given_up);
        }
    }, 300 * millisecond);
    CHECK(eventually([&] { return family.board().num_calls >= 20; }));
    family.signal(1, SIGSTOP);
}

TEST(processes_that_end_right_after_the_last_call_hurt_nobody) {
    for (std::size_t i = 0; i < times(40); ++i) {
        Family family(3, [=](const std::shared_ptr<Group>& group, Board&) {
            Random random(i);
            for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
                run_case(*group, make_case(random, 3, Kind::allreduce, DType::int64, i % 2 == 0 ? 100 : 50'000,
                                           Memory::any), sequence);
            }
            _exit(num_failed == 0 ? 0 : 1);  // without leaving
        });
    }
}

}  // namespace ferrodist::tests
