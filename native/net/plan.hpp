// SPDX-License-Identifier: MIT OR Apache-2.0
// Plan: the steps of one rank in a collective, where its cells lie, and how to reduce.
//
// Made from the integers that ferrodist.schedules.table describes; nothing in them is believed.
//
// The executor does what a plan says, over the links of a mesh, without the GIL. A message of a step is cut into
// pieces. They go out as the kernel takes them, those of the other side come straight into their cells, and each is
// reduced while later ones are on their way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "net/group.hpp"
#include "reduce/reduce.hpp"

namespace ferrodist::net {

enum class Space : int { mine, out, scratch };

struct Cell {
    Space space;
    int chunk;
};

struct LocalOperation {
    int into;
    std::vector<int> operands;  // one is copied, more are reduced from left to right
};

struct Instruction {
    int send_to, recv_from;  // -1: nobody
    std::vector<int> sent, received;
    std::vector<LocalOperation> operations;
    bool is_piecewise, is_entangled;
};

struct Range {
    std::uint64_t begin, end;
};

// Where the cells of one segment lie, in bytes.
struct Layout {
    std::vector<Range> ranges;
    std::uint64_t scratch_nbytes;
};

struct Reduction {
    DType dtype;
    Op op;
    std::uint64_t divisor;
    bool is_float32;         // 16-bit floats are held as float32 until the end
    // What is done to the result at last, if anything: the mean of unfinished sums that have travelled, or a logical
    // op, where the result may be an input as it is.
    std::optional<Op> last_op;
};

class Plan {
public:
    // `ranges` has two numbers per cell, segment by segment. `peers` are the ranks of the group behind
    // those of the table; none are needed if they are the same. Throws std::invalid_argument.
    Plan(std::span<const std::int32_t> table, std::span<const std::uint64_t> ranges,
         std::span<const std::uint64_t> scratch_nbytes, const Reduction& reduction, std::span<const int> peers);

    std::uint32_t kind() const { return kind_; }
    // Above every rank of the group that it names.
    int num_ranks() const { return num_ranks_; }
    const std::vector<Cell>& cells() const { return cells_; }
    const std::vector<Instruction>& instructions() const { return instructions_; }
    const std::vector<Layout>& layouts() const { return layouts_; }
    const Reduction& reduction() const { return reduction_; }
    // How much memory of the caller it reads and writes.
    std::uint64_t source_nbytes() const { return source_nbytes_; }
    std::uint64_t target_nbytes() const { return target_nbytes_; }

private:
    void check_works() const;

    std::uint32_t kind_;
    int num_ranks_;
    std::vector<Cell> cells_;
    std::vector<Instruction> instructions_;
    std::vector<Layout> layouts_;
    Reduction reduction_;
    std::uint64_t source_nbytes_ = 0, target_nbytes_ = 0;
};

// What one collective works on.
struct Task {
    const std::byte* source;
    std::byte* target;
    bool is_in_place;  // source and target are the same memory
    std::uint64_t sequence, fingerprint;
};

Status execute(Group& group, const Plan& plan, const Task& task, const WaitOptions& options);

// One message to a rank and one from a rank at once, either may be missing (rank -1): for executors elsewhere.
Status exchange(Group& group, std::uint32_t kind, int to, Bytes outgoing, int from, std::byte* into,
                std::size_t size, const Task& task, const WaitOptions& options);

}  // namespace ferrodist::net
