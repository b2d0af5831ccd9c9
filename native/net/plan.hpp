// SPDX-License-Identifier: MIT OR Apache-2.0
// Plan: the steps of one rank in a collective, where its cells lie, and how to fold.
//
// Made from the integers that ferrodist.schedules.table describes; nothing in them is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fold/fold.hpp"

namespace ferrodist::net {

enum class Space : int { mine, out, scratch };

struct Cell {
    Space space;
    int chunk;
};

struct Work {
    int into;
    std::vector<int> operands;  // one is copied, more are folded from left to right
};

struct Row {
    int send_to, recv_from;  // -1: nobody
    std::vector<int> sent, received;
    std::vector<Work> works;
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

struct Folding {
    DType dtype;
    Op op;
    std::uint64_t divisor;
    bool is_wide;         // 16-bit floats are held as float32 until the end
    bool divides_at_end;  // the mean of a result whose unfinished sums have travelled
};

class Plan {
public:
    // `ranges` has two numbers per cell, segment by segment. `peers` are the ranks of the group behind
    // those of the table; none are needed if they are the same. Throws std::invalid_argument.
    Plan(std::span<const std::int32_t> table, std::span<const std::uint64_t> ranges,
         std::span<const std::uint64_t> scratch_nbytes, const Folding& folding, std::span<const int> peers);

    std::uint32_t kind() const { return kind_; }
    // Above every rank of the group that it names.
    int num_ranks() const { return num_ranks_; }
    const std::vector<Cell>& cells() const { return cells_; }
    const std::vector<Row>& rows() const { return rows_; }
    const std::vector<Layout>& layouts() const { return layouts_; }
    const Folding& folding() const { return folding_; }
    // How much memory of the caller it reads and writes.
    std::uint64_t source_nbytes() const { return source_nbytes_; }
    std::uint64_t target_nbytes() const { return target_nbytes_; }

private:
    void check_works() const;

    std::uint32_t kind_;
    int num_ranks_;
    std::vector<Cell> cells_;
    std::vector<Row> rows_;
    std::vector<Layout> layouts_;
    Folding folding_;
    std::uint64_t source_nbytes_ = 0, target_nbytes_ = 0;
};

}  // namespace ferrodist::net
