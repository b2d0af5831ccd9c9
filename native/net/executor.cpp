// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/plan.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "net/waiter.hpp"

namespace ferrodist::net {
namespace {

// -- the memory of one execution: cells, messages made of them, and what is done with them ----------

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

// -- the steps --------------------------------------------------------------------------------------

constexpr std::size_t pieces_ahead = 8;  // queued and not yet with the kernel

// One step: a message out, a message in, and what is done with each piece that comes.
class Step : core::NonCopyable {
public:
    Step(Group& group, Lock& lock, Waiter& waiter, int to, int from, Message out, Message in)
        : group_(group), lock_(lock), waiter_(waiter), to_(to), from_(from), out_(std::move(out)),
          in_(std::move(in)), num_out_(to < 0 ? 0 : out_.num_pieces()), num_in_(from < 0 ? 0 : in_.num_pieces()),
          is_aliased_(num_out_ > 0 && num_in_ > 0 && in_.overlaps(out_)) {}

    ~Step() {
        if (from_ >= 0) {
            group_.forget(from_);
        }
        if (ticket_.pending > 0) {
            group_.take_back_pieces(to_, ticket_);
        }
    }

    // `on_piece(index)` is called, without the lock, for each piece in turn.
    template <class OnPiece>
    Status run(const OnPiece& on_piece) {
        while (true) {
            const std::uint64_t epoch = group_.mesh().epoch();
            feed();
            Status flaw;
            const bool has_one = num_done_ < num_in_ && take(flaw);
            if (flaw.failed()) {
                return flaw;
            }
            if (has_one) {
                lock_.unlock();
                on_piece(num_done_);
                lock_.lock();
                ++num_done_;
                waiter_.progressed();
                continue;
            }
            if (num_done_ == num_in_ && num_queued_ == num_out_ && ticket_.pending == 0) {
                return {};
            }
            if (group_.mesh().epoch() != epoch) {
                continue;
            }
            if (const Status status = wait(epoch); status.failed()) {
                return status;
            }
        }
    }

private:
    std::size_t num_sent() const { return num_queued_ - ticket_.pending; }

    // Queues as much as may go out now: not far ahead of what comes in, so that all of it stays cached.
    void feed() {
        const std::size_t limit = num_done_ == num_in_ ? num_out_ : std::min(num_out_, num_done_ + pieces_ahead);
        while (num_queued_ < limit && ticket_.pending < pieces_ahead &&
               group_.has_window(to_, out_.size_of(num_queued_))) {
            const std::vector<View> parts = out_.parts(num_queued_);
            if (parts.size() <= 1) {
                const View piece = parts.empty() ? View{} : parts.front();
                group_.send_piece(to_, {piece.data, piece.size}, ticket_);
            } else {
                joined_.push_back(join(parts, out_.size_of(num_queued_)));
                group_.send_piece(to_, {joined_.back().get(), out_.size_of(num_queued_)}, ticket_);
            }
            ++num_queued_;
        }
    }

    static std::unique_ptr<std::byte[]> join(const std::vector<View>& parts, std::size_t size) {
        std::unique_ptr<std::byte[]> joined(new std::byte[size]);
        std::size_t at = 0;
        for (const View& part : parts) {
            std::memcpy(joined.get() + at, part.data, part.size);
            at += part.size;
        }
        return joined;
    }

    // How many pieces are in their cells.
    std::size_t num_arrived() const { return num_taken_ + group_.num_here(from_); }
    // Whether what comes as piece `index` cannot fall on what is still to go out.
    bool has_gone(std::size_t index) const { return index >= num_out_ || num_sent() > index; }

    // Says where pieces go that are to come, and takes those that came too early. Tells whether the next
    // one may be worked on.
    bool take(Status& flaw) {
        while (num_expected_ < num_in_ && (!is_aliased_ || has_gone(num_expected_))) {
            const bool is_next = num_expected_ == num_arrived();
            if (group_.has_piece(from_)) {
                std::optional<Payload> payload = group_.take_piece(from_, in_.size_of(num_arrived()), flaw);
                if (!payload || !is_next) {
                    break;
                }
                spread(*payload);
                ++num_taken_;
            } else if (in_.is_contiguous(num_expected_)) {
                group_.expect(from_, in_.piece(num_expected_).data, in_.size_of(num_expected_));
            } else {
                break;
            }
            ++num_expected_;
        }
        if (num_arrived() < num_expected_ && group_.has_piece(from_)) {  // and yet did not go to its place
            group_.take_piece(from_, in_.size_of(num_arrived()), flaw);
        }
        return num_done_ < num_arrived() && has_gone(num_done_);
    }

    void spread(const Payload& payload) {
        std::size_t at = 0;
        for (const View& part : in_.parts(num_expected_)) {
            std::memcpy(part.data, payload.memory.get() + at, part.size);
            at += part.size;
        }
    }

    Status wait(std::uint64_t epoch) {
        const bool waits_for_piece = num_done_ < num_in_ && num_done_ == num_arrived();
        const int awaited = waits_for_piece ? from_ : to_;
        group_.set_waiting_for(awaited);
        Status status = group_.trouble(awaited);
        if (!status.failed() && waiter_.is_time_to_poll()) {
            status = group_.slow_trouble();
        }
        if (!status.failed()) {
            const std::int64_t begin = core::now_ns();
            status = waiter_.until_change(epoch);
            group_.note_wait(awaited, core::now_ns() - begin);
        }
        if (status.code == StatusCode::late) {
            status = group_.expire(lock_, waiter_.options());
        }
        group_.set_waiting_for(-1);
        return status;
    }

    Group& group_;
    Lock& lock_;
    Waiter& waiter_;
    const int to_, from_;
    const Message out_, in_;
    const std::size_t num_out_, num_in_;
    const bool is_aliased_;
    Ticket ticket_;
    std::size_t num_queued_ = 0;                   // going out
    std::size_t num_expected_ = 0, num_taken_ = 0;  // coming in: with a place, or here; that came too early
    std::size_t num_done_ = 0;                     // worked on
    std::vector<std::unique_ptr<std::byte[]>> joined_;
};

Status execute_instruction(Group& group, Lock& lock, Waiter& waiter, Segment& segment,
                           const Instruction& instruction, std::size_t piece) {
    Message out = segment.message(instruction.sent, piece), in = segment.message(instruction.received, piece);
    std::vector<std::byte> copy;
    if (instruction.is_entangled && instruction.send_to >= 0) {  // what comes may fall anywhere on what goes out
        for (std::size_t i = 0; i < out.num_pieces(); ++i) {
            for (const View& part : out.parts(i)) {
                copy.insert(copy.end(), part.data, part.data + part.size);
            }
        }
        out = Message({{copy.data(), copy.size()}}, piece);
    }
    if (instruction.send_to >= 0 || instruction.recv_from >= 0) {
        Step step(group, lock, waiter, instruction.send_to, instruction.recv_from, std::move(out), std::move(in));
        const Status status = step.run([&](std::size_t index) {
            if (instruction.is_piecewise) {
                segment.apply(instruction.operations, index * piece, piece);
            }
        });
        if (status.failed()) {
            return status;
        }
    }
    if (!instruction.is_piecewise) {
        lock.unlock();
        segment.apply(instruction.operations, 0, SIZE_MAX);
        lock.lock();
    }
    return {};
}

// In a call while it lives.
class Presence : core::NonCopyable {
public:
    Presence(Group& group, const Task& task, std::uint32_t kind)
        : group_(group), status(group.enter(task.sequence, kind, task.fingerprint)) {}
    ~Presence() { group_.exit(); }

private:
    Group& group_;

public:
    const Status status;
};

}  // namespace

Status execute(Group& group, const Plan& plan, const Task& task, const WaitOptions& options) {
    Lock lock = group.mesh().lock();
    Waiter waiter(group.mesh(), lock, options);
    const Presence presence(group, task, plan.kind());
    if (presence.status.failed()) {
        return presence.status;
    }
    const std::size_t piece = group.mesh().options().piece_nbytes;
    for (const Layout& layout : plan.layouts()) {
        Segment segment(plan, layout, task);
        for (const Instruction& instruction : plan.instructions()) {
            const Status status = execute_instruction(group, lock, waiter, segment, instruction, piece);
            if (status.failed()) {
                return status;
            }
        }
        segment.narrow_results();
    }
    const Reduction& reduction = plan.reduction();
    if (reduction.last_op && task.target != nullptr) {
        const void* operand = task.target;
        local_reduce(reduction.dtype, *reduction.last_op, task.target, &operand, 1,
                     plan.target_nbytes() / item_size(reduction.dtype), reduction.divisor);
    }
    return {};
}

Status exchange(Group& group, std::uint32_t kind, int to, Bytes outgoing, int from, std::byte* into,
                std::size_t size, const Task& task, const WaitOptions& options) {
    Lock lock = group.mesh().lock();
    Waiter waiter(group.mesh(), lock, options);
    const Presence presence(group, task, kind);
    if (presence.status.failed()) {
        return presence.status;
    }
    const std::size_t piece = std::max<std::size_t>({1, outgoing.size(), size});
    Message out({{const_cast<std::byte*>(outgoing.data()), outgoing.size()}}, piece), in({{into, size}}, piece);
    Step step(group, lock, waiter, to, from, std::move(out), std::move(in));
    return step.run([](std::size_t) {});
}

}  // namespace ferrodist::net
