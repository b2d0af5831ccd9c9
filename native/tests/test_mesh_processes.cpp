// SPDX-License-Identifier: MIT OR Apache-2.0
// Meshes of processes that are stopped, or forked.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "check.hpp"
#include "meshes.hpp"

namespace ferrodist::tests {
namespace {

using net::Group;
using core::StatusCode;

// A pipe: what one process writes lets another go on.
class Signpost {
public:
    Signpost() { CHECK_EQUAL(pipe(ends_), 0); }
    ~Signpost() {
        ::close(ends_[0]);
        ::close(ends_[1]);
    }
    Signpost(const Signpost&) = delete;
    Signpost& operator=(const Signpost&) = delete;

    void let_go() const { CHECK_EQUAL(::write(ends_[1], "x", 1), 1); }
    void wait() const {
        char one;
        while (::read(ends_[0], &one, 1) < 0 && errno == EINTR) {
        }
    }

private:
    int ends_[2];
};

// Runs in a process of its own, whose end tells whether all checks were passed.
pid_t start_process(const std::function<void()>& work) {
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        num_failed = 0;
        work();
        _exit(num_failed == 0 ? 0 : 1);
    }
    CHECK(pid > 0);
    return pid;
}

void check_ends_well(pid_t pid) {
    int status = 0;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

// How long it takes at most, on this host as it is now, until something is heard of a rank that does nothing.
std::int64_t longest_gap() {
    Meshes meshes(2);
    std::int64_t longest = 0, last = core::now_ns();
    for (int i = 0; i < 20; ++i) {
        const std::uint64_t before = meshes.mesh(0).received_nbytes();
        CHECK(eventually([&] { return meshes.mesh(0).received_nbytes() != before; }));
        const std::int64_t now = core::now_ns();
        longest = std::max(longest, now - last);
        last = now;
    }
    return longest;
}

TEST(ranks_that_were_all_stopped_do_not_take_each_other_for_silent) {
    const std::int64_t heartbeat_timeout = std::max(300 * millisecond, 10 * longest_gap());
    Signpost is_waiting, may_go;
    const pid_t pid = start_process([&] {
        Meshes meshes(2, {.heartbeat_timeout_ns = heartbeat_timeout});
        std::atomic<int> num_polls{0};
        run_threads(2, [&](int rank) {
            Buffer piece(100);
            if (rank == 0) {
                ActingHook hook([&] { return ++num_polls > 0; });
                const core::WaitOptions options{&hook, 0, core::no_spins};
                const net::Task task{nullptr, nullptr, false, 1, 1};
                CHECK_EQUAL(net::exchange(meshes.group(0), 1, -1, {}, 1, piece.data(), 100, task, options).code,
                            StatusCode::done);
                return;
            }
            CHECK(eventually([&] { return meshes.group(0).last_call(0).first == 1; }));
            is_waiting.let_go();
            may_go.wait();
            const int before = num_polls;  // it looks round, and again
            CHECK(eventually([&] { return num_polls >= before + 3; }));
            CHECK_EQUAL(trade(meshes.group(1), {.sequence = 1, .to = 0, .out = piece}).code, StatusCode::done);
        });
    });
    is_waiting.wait();
    CHECK_EQUAL(kill(pid, SIGSTOP), 0);
    CHECK_EQUAL(waitpid(pid, nullptr, WUNTRACED), pid);
    const std::int64_t end = core::now_ns() + 3 * heartbeat_timeout;
    CHECK(eventually([&] { return core::now_ns() > end; }));
    CHECK_EQUAL(kill(pid, SIGCONT), 0);
    may_go.let_go();
    check_ends_well(pid);
}

// Threads of the mesh may hold its lock at the moment of a fork; in the child it stays locked.
TEST(a_forked_child_drops_its_copy_of_a_mesh_and_harms_nobody) {
    Meshes meshes(2);
    std::atomic<bool> is_over{false};
    run_threads(3, [&](int number) {
        if (number < 2) {  // they talk until one says that it is over
            Buffer out(1), in(1);
            for (std::uint64_t sequence = 1; in[0] == std::byte{0} && out[0] == std::byte{0}; ++sequence) {
                out[0] = std::byte{static_cast<std::uint8_t>(number == 0 && is_over)};
                CHECK_EQUAL(trade(meshes.group(number), {sequence, 1 - number, out, 1 - number, in}).code,
                            StatusCode::done);
            }
            return;
        }
        for (std::size_t i = 0; i < times(50); ++i) {
            check_ends_well(start_process([&] {
                CHECK(meshes.mesh(0).is_of_ancestor());
                meshes.mesh(0).finish();
                meshes.kill(0);
                meshes.kill(1);
            }));
        }
        is_over = true;
    });
}

TEST(the_end_of_a_rank_is_heard_though_a_child_of_it_lives_on) {
    Meshes meshes(2);
    Signpost is_there, may_go;
    const pid_t pid = start_process([&] {
        is_there.let_go();
        may_go.wait();
    });
    is_there.wait();
    meshes.kill(1);
    Buffer here(10);
    CHECK_EQUAL(trade(meshes.group(0), {.sequence = 1, .from = 1, .in = here}).code, StatusCode::lost);
    may_go.let_go();
    check_ends_well(pid);
}

}  // namespace ferrodist::tests
