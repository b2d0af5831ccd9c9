// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/plan.hpp"

#include <algorithm>
#include <stdexcept>

namespace ferrodist::net {
namespace {

void require(bool is_right) {
    if (!is_right) {
        throw std::invalid_argument("a plan that cannot be executed");
    }
}

// Reads integers one after the other.
class Reader {
public:
    explicit Reader(std::span<const std::int32_t> ints) : ints_(ints) {}

    int next() {
        require(at_ < ints_.size());
        return ints_[at_++];
    }
    int next(int low, int high) {
        const int number = next();
        require(number >= low && number < high);
        return number;
    }
    std::size_t length() {
        const int number = next();
        require(number >= 0 && static_cast<std::size_t>(number) <= ints_.size());
        return static_cast<std::size_t>(number);
    }
    std::vector<int> list(int end) {
        std::vector<int> numbers(length());
        for (int& number : numbers) {
            number = next(0, end);
        }
        return numbers;
    }
    bool is_at_end() const { return at_ == ints_.size(); }

private:
    std::span<const std::int32_t> ints_;
    std::size_t at_ = 0;
};

}  // namespace

Plan::Plan(std::span<const std::int32_t> table, std::span<const std::uint64_t> ranges,
           std::span<const std::uint64_t> scratch_nbytes, const Reduction& reduction, std::span<const int> peers)
    : reduction_(reduction) {
    Reader reader(table);
    kind_ = static_cast<std::uint32_t>(reader.next());
    const int world = reader.next(1, 1 << 20);
    require(peers.empty() || peers.size() == static_cast<std::size_t>(world));
    num_ranks_ = peers.empty() ? world : *std::max_element(peers.begin(), peers.end()) + 1;
    require(peers.empty() || *std::min_element(peers.begin(), peers.end()) >= 0);
    const auto peer = [&](int rank) {
        return rank < 0 || peers.empty() ? rank : peers[static_cast<std::size_t>(rank)];
    };
    for (int i = 0; i < 4; ++i) {
        reader.next();  // rank, root, chunks and areas: the ranges have it all
    }
    cells_.resize(reader.length());
    for (Cell& cell : cells_) {
        cell.space = static_cast<Space>(reader.next(0, 3));
        cell.chunk = reader.next();
        reader.next();  // slot
        reader.next();  // area
    }
    const int num_cells = static_cast<int>(cells_.size());
    instructions_.resize(reader.length());
    for (Instruction& instruction : instructions_) {
        instruction.send_to = peer(reader.next(-1, world));
        instruction.sent = reader.list(num_cells);
        instruction.recv_from = peer(reader.next(-1, world));
        instruction.received = reader.list(num_cells);
        instruction.operations.resize(reader.length());
        for (LocalOperation& operation : instruction.operations) {
            operation.into = reader.next(0, num_cells);
            operation.operands = reader.list(num_cells);
            require(!operation.operands.empty());
        }
        instruction.is_piecewise = reader.next() != 0;
        instruction.is_entangled = reader.next() != 0;
    }
    require(reader.is_at_end() && ranges.size() == 2 * cells_.size() * scratch_nbytes.size());
    for (std::size_t segment = 0; segment < scratch_nbytes.size(); ++segment) {
        Layout layout{{}, scratch_nbytes[segment]};
        for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
            const std::size_t at = 2 * (segment * cells_.size() + cell);
            const Range range{ranges[at], ranges[at + 1]};
            require(range.begin <= range.end);
            switch (cells_[cell].space) {
                case Space::mine:
                    source_nbytes_ = std::max(source_nbytes_, range.end);
                    break;
                case Space::out:
                    target_nbytes_ = std::max(target_nbytes_, range.end);
                    break;
                case Space::scratch:
                    require(range.end <= layout.scratch_nbytes);
            }
            layout.ranges.push_back(range);
        }
        layouts_.push_back(std::move(layout));
    }
    if (reduction_.is_float32) {  // ranges are of float32, memory is of half that
        source_nbytes_ /= 2;
        target_nbytes_ /= 2;
    }
    check_works();
}

// What is reduced or copied must be of one length, in every segment.
void Plan::check_works() const {
    for (const Layout& layout : layouts_) {
        const auto length = [&](int cell) {
            const Range& range = layout.ranges[static_cast<std::size_t>(cell)];
            return range.end - range.begin;
        };
        for (const Instruction& instruction : instructions_) {
            for (const LocalOperation& operation : instruction.operations) {
                for (const int operand : operation.operands) {
                    require(length(operand) == length(operation.into));
                }
            }
        }
    }
}

}  // namespace ferrodist::net
