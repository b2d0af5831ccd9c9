// SPDX-License-Identifier: MIT OR Apache-2.0
#include "net/executor.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "net/segment.hpp"
#include "net/waiter.hpp"

namespace ferrodist::net {
namespace {

constexpr std::size_t pieces_ahead = 8;  // queued and not yet with the kernel

// One step: a message out, a message in, and what is done with each piece that comes.
class Step {
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
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

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
class Presence {
public:
    Presence(Group& group, const Task& task, std::uint32_t kind)
        : group_(group), status(group.enter(task.sequence, kind, task.fingerprint)) {}
    ~Presence() { group_.exit(); }
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

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
