// SPDX-License-Identifier: MIT OR Apache-2.0
#include "hybrid/program.hpp"

#include <algorithm>

#include "core/memory.hpp"
#include "net/plan.hpp"

namespace ferrodist::hybrid {
namespace {

// More than any program has: the collectives of a call on this host are told apart by their fingerprints.
constexpr std::uint64_t most_instructions = 1 << 20;

// Polls in a wait inside a host: only here what befell other hosts is noticed.
class IntraNodeHook final : public core::ProgressHook {
public:
    IntraNodeHook(const core::WaitOptions& options, net::Group& group) : options_(options), group_(group) {}

    void let_go() override { options_.hook->let_go(); }
    bool poll() override {
        if (!options_.hook->poll()) {
            return false;
        }
        found = group_.poll_all();
        if (!found.failed() && options_.is_late()) {  // ranks are barred between hosts, and on this one alike
            net::Lock guard = group_.mesh().lock();
            found = group_.expire(guard, core::WaitOptions(options_));  // whose deadline is not put off
        }
        return !found.failed();
    }
    void progressed() override { options_.hook->progressed(); }

    Status found;

private:
    const core::WaitOptions& options_;
    net::Group& group_;
};

// Shows the ranks of other hosts that this one is in the call, though it sends nothing.
Status enter(const Levels& levels, const Task& task) {
    const net::Lock guard = levels.inter_node.mesh().lock();
    const Status status = levels.inter_node.enter(task.sequence, task.call_kind, task.fingerprint);
    levels.inter_node.set_waiting_for(net::waits_elsewhere);
    const bool is_over = status.code == core::StatusCode::given_up || status.code == core::StatusCode::group_error;
    return is_over ? status : Status{};  // the ranks of this host find out together that ranks differ
}

Status run_intra_node(const Levels& levels, const Task& task, const shm::Task& intra, const core::WaitOptions& options) {
    if (const Status status = enter(levels, task); status.failed()) {
        return status;
    }
    IntraNodeHook hook(options, levels.inter_node);
    core::WaitOptions own = options;
    own.hook = &hook;
    own.deadline_ns = own.timeout_ns = 0;  // which the hook sees to
    own.spins = options.spins == core::no_spins ? core::no_spins : levels.intra_node.spins();
    Status status = shm::run(levels.intra_node, intra, own);
    if (hook.found.failed()) {
        return hook.found;
    }
    if (status.failed_rank >= 0) {
        status.failed_rank = levels.local[static_cast<std::size_t>(status.failed_rank)];
    }
    return status;
}

class Execution {
public:
    Execution(const Levels& levels, const Program& program, const Task& task, const core::WaitOptions& options)
        : levels_(levels), task_(task), options_(options),
          scratch_(take_scratch(program.nbytes_of(Space::scratch))) {}

    Status operator()(const IntraNode& one) {
        ++num_rounds_;
        const std::uint64_t place = static_cast<std::uint64_t>(task_.index) * most_instructions + num_rounds_;
        const shm::Task intra{one.kind,       one.dtype,  one.op,  one.root,     at(one.source),
                              at(one.target), one.nbytes, nullptr, one.in_place, task_.fingerprint + place};
        return run_intra_node(levels_, task_, intra, options_);
    }

    Status operator()(const InterNode& one) {
        const Status status =
            net::execute(levels_.inter_node, *one.plan,
                      {at(one.source), at(one.target), one.in_place, task_.sequence, task_.fingerprint}, options_);
        return status.code == core::StatusCode::mismatch ? tell_mismatch(levels_, task_, options_) : status;
    }

    Status operator()(const Copy& one) {
        copy_bytes(at(one.target), at(one.source), one.target.nbytes);
        return {};
    }

    Status operator()(const ToFloat32& one) {
        widen(one.half, at(one.target), at(one.source), one.source.nbytes / item_size(one.half));
        return {};
    }

    Status operator()(const FromFloat32& one) {
        narrow(one.half, at(one.target), at(one.source), one.target.nbytes / item_size(one.half));
        return {};
    }

    Status operator()(const Divide& one) {
        const void* operand = at(one.target);
        local_reduce(one.dtype, Op::mean, at(one.target), &operand, 1, one.target.nbytes / item_size(one.dtype), one.divisor);
        return {};
    }

private:
    struct Release {
        void operator()(std::byte* memory) const noexcept { release_warm(memory); }
    };
    using Scratch = std::unique_ptr<std::byte[], Release>;

    static Scratch take_scratch(std::size_t nbytes) {
        return Scratch(nbytes == 0 ? nullptr : static_cast<std::byte*>(take_warm(nbytes)));
    }

    std::byte* at(const Span& span) const {
        switch (span.space) {
            case Space::none:
                return nullptr;
            case Space::input:
                return const_cast<std::byte*>(task_.input) + span.begin;  // which nothing writes to
            case Space::output:
                return task_.output + span.begin;
            case Space::scratch:
                return scratch_.get() + span.begin;
        }
        return nullptr;
    }

    const Levels& levels_;
    const Task& task_;
    const core::WaitOptions& options_;
    Scratch scratch_;
    std::uint64_t num_rounds_ = 0;
};

}  // namespace

void Program::note(const Span& span) {
    std::uint64_t& nbytes = nbytes_[static_cast<std::size_t>(span.space)];
    nbytes = std::max(nbytes, span.begin + span.nbytes);
}

void Program::add(Instruction instruction) {
    std::visit([&](const auto& one) {
        if constexpr (requires { one.source; }) {
            note(one.source);
        }
        note(one.target);
    }, instruction);
    instructions_.push_back(std::move(instruction));
}

Status tell_mismatch(const Levels& levels, const Task& task, const core::WaitOptions& options) {
    shm::Task intra{shm::Kind::barrier};
    intra.fingerprint = levels.mismatch_fingerprint;
    const Status status = run_intra_node(levels, task, intra, options);
    return status.failed() ? status : Status{core::StatusCode::mismatch};  // done: all of the host tell of one
}

Status execute(const Levels& levels, const Program& program, const Task& task, const core::WaitOptions& options) {
    options.begin();
    Execution execution(levels, program, task, options);
    for (const Instruction& instruction : program.instructions()) {
        if (const Status status = std::visit(execution, instruction); status.failed()) {
            return status;
        }
    }
    const net::Lock guard = levels.inter_node.mesh().lock();
    levels.inter_node.exit();
    return {};
}

}  // namespace ferrodist::hybrid
