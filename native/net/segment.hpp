// SPDX-License-Identifier: MIT OR Apache-2.0
// The memory of one execution: cells, messages made of them, and what is done with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "net/plan.hpp"
#include "net/executor.hpp"

namespace ferrodist::net {

struct View {
    std::byte* data = nullptr;
    std::size_t size = 0;

    View part(std::size_t begin, std::size_t length) const {
        begin = std::min(begin, size);
        return {data + begin, std::min(length, size - begin)};
    }
    bool overlaps(const View& other) const {
        return data < other.data + other.size && other.data < data + size;
    }
};

// Several cells as one run of bytes, cut into pieces; there is always at least one, maybe empty.
class Message {
public:
    Message(std::vector<View> cells, std::size_t piece) : cells_(std::move(cells)), piece_(piece) {
        for (const View& cell : cells_) {
            size_ += cell.size;
        }
    }

    std::size_t num_pieces() const { return std::max<std::size_t>(1, (size_ + piece_ - 1) / piece_); }
    std::size_t size_of(std::size_t index) const { return std::min(piece_, size_ - index * piece_); }
    // A piece, if it lies within one cell.
    bool is_contiguous(std::size_t index) const { return parts(index).size() <= 1; }
    View piece(std::size_t index) const {
        const std::vector<View> found = parts(index);
        return found.empty() ? View{} : found.front();
    }
    std::vector<View> parts(std::size_t index) const {
        std::vector<View> found;
        std::size_t begin = index * piece_, rest = size_of(index);
        for (const View& cell : cells_) {
            if (begin >= cell.size) {
                begin -= cell.size;
                continue;
            }
            const View part = cell.part(begin, rest);
            begin = 0;
            rest -= part.size;
            if (part.size > 0) {
                found.push_back(part);
            }
            if (rest == 0) {
                break;
            }
        }
        return found;
    }
    bool overlaps(const Message& other) const {
        for (const View& one : cells_) {
            for (const View& two : other.cells_) {
                if (one.overlaps(two)) {
                    return true;
                }
            }
        }
        return false;
    }

private:
    std::vector<View> cells_;
    std::size_t piece_, size_ = 0;
};

// The memory of the cells of one segment.
class Segment {
public:
    Segment(const Plan& plan, const Layout& layout, const Task& task)
        : plan_(plan), layout_(layout), task_(task), views_(plan.cells().size()),
          scratch_(new std::byte[layout.scratch_nbytes + 1]) {}

    View view(int cell) {
        View& found = views_[static_cast<std::size_t>(cell)];
        if (found.data == nullptr) {
            found = open(static_cast<std::size_t>(cell));
        }
        return found;
    }

    Message message(const std::vector<int>& cells, std::size_t piece) {
        std::vector<View> found;
        for (const int cell : cells) {
            found.push_back(view(cell));
        }
        return {std::move(found), piece};
    }

    // Reduces and copies, on a part of each cell.
    void apply(const std::vector<LocalOperation>& operations, std::size_t begin, std::size_t length) {
        for (const LocalOperation& operation : operations) {
            if (is_there_already(operation)) {
                continue;
            }
            const View into = view(operation.into).part(begin, length);
            if (operation.operands.size() == 1) {
                std::memmove(into.data, view(operation.operands[0]).part(begin, length).data, into.size);
                continue;
            }
            operands_.clear();
            for (const int operand : operation.operands) {
                operands_.push_back(view(operand).part(begin, length).data);
            }
            const Reduction& reduction = plan_.reduction();
            const DType dtype = reduction.is_float32 ? DType::float32 : reduction.dtype;
            local_reduce(dtype, reduction.op, into.data, operands_.data(), operands_.size(), into.size / item_size(dtype),
                 reduction.op == Op::mean ? reduction.divisor : 1);
        }
    }

    // Rounds float32 results to the caller's 16-bit floats, once.
    void narrow_results() {
        const Reduction& reduction = plan_.reduction();
        if (!reduction.is_float32 || task_.target == nullptr) {
            return;
        }
        for (std::size_t cell = 0; cell < views_.size(); ++cell) {
            const View& wide = views_[cell];
            if (plan_.cells()[cell].space != Space::out || wide.data == nullptr) {
                continue;
            }
            const std::size_t count = wide.size / 4;
            if (reduction.divisor > 1) {
                const void* operand = wide.data;
                local_reduce(DType::float32, Op::mean, wide.data, &operand, 1, count, reduction.divisor);
            }
            narrow(reduction.dtype, task_.target + layout_.ranges[cell].begin / 2, wide.data, count);
        }
    }

private:
    // A copy from the input to the result, where they are the same memory.
    bool is_there_already(const LocalOperation& operation) const {
        const auto& cells = plan_.cells();
        const Cell& into = cells[static_cast<std::size_t>(operation.into)];
        const Cell& from = cells[static_cast<std::size_t>(operation.operands[0])];
        return task_.is_in_place && operation.operands.size() == 1 && into.chunk == from.chunk &&
               from.space == Space::mine && into.space == Space::out && !plan_.reduction().is_float32;
    }

    View open(std::size_t cell) {
        const Range& range = layout_.ranges[cell];
        const std::size_t size = range.end - range.begin;
        const Space space = plan_.cells()[cell].space;
        if (space == Space::scratch) {
            return {scratch_.get() + range.begin, size};
        }
        std::byte* memory = space == Space::mine ? const_cast<std::byte*>(task_.source) : task_.target;
        if (!plan_.reduction().is_float32) {
            return {memory == nullptr ? scratch_.get() : memory + range.begin, size};
        }
        wide_.push_back(std::unique_ptr<std::byte[]>(new std::byte[size + 1]));
        if (space == Space::mine) {
            widen(plan_.reduction().dtype, wide_.back().get(), memory + range.begin / 2, size / 4);
        }
        return {wide_.back().get(), size};
    }

    const Plan& plan_;
    const Layout& layout_;
    const Task& task_;
    std::vector<View> views_;
    std::unique_ptr<std::byte[]> scratch_;
    std::vector<std::unique_ptr<std::byte[]>> wide_;
    std::vector<const void*> operands_;
};

}  // namespace ferrodist::net
