// SPDX-License-Identifier: MIT OR Apache-2.0
#include "hybrid/program.hpp"

#include <algorithm>

#include "copy.hpp"
#include "net/walker.hpp"
#include "warm_memory.hpp"

namespace ferrodist::hybrid {
namespace {

// More than any program has: the collectives of a call on this host are told apart by their fingerprints.
constexpr std::uint64_t most_instructions = 1 << 20;

// Polls in a wait inside a host: only here what befell other hosts is noticed.
class IntraNodeWatch final : public shm::Watch {
public:
    IntraNodeWatch(const shm::Patience& patience, net::Group& group) : patience_(patience), group_(group) {}

    void let_go() override { patience_.watch->let_go(); }
    bool look() override {
        if (!patience_.watch->look()) {
            return false;
        }
        found = group_.look_round();
        if (!found.failed() && patience_.is_late()) {  // ranks are barred between hosts, and on this one alike
            net::Lock guard = group_.mesh().lock();
            shm::Watch nobody;
            found = group_.expire(guard, {&nobody});
        }
        return !found.failed();
    }

    Ending found;

private:
    const shm::Patience& patience_;
    net::Group& group_;
};

// Shows the ranks of other hosts that this one is in the call, though it sends nothing.
Ending enter(const Levels& levels, const Task& task) {
    const net::Lock guard = levels.inter_node.mesh().lock();
    const Ending ending = levels.inter_node.enter(task.sequence, task.call_kind, task.fingerprint);
    levels.inter_node.set_waiting_for(net::waits_elsewhere);
    const bool is_over = ending.outcome == shm::Outcome::given_up || ending.outcome == shm::Outcome::verdict;
    return is_over ? ending : Ending{};  // the ranks of this host find out together that ranks differ
}

Ending run_intra_node(const Levels& levels, const Task& task, const shm::Task& intra, const shm::Patience& patience) {
    if (const Ending ending = enter(levels, task); ending.failed()) {
        return ending;
    }
    IntraNodeWatch watch(patience, levels.inter_node);
    shm::Patience own = patience;
    own.watch = &watch;
    own.deadline_ns = own.timeout_ns = 0;  // which the watch sees to
    own.spins = patience.spins == shm::no_spins ? shm::no_spins : levels.intra_node.spins();
    Ending ending = shm::run(levels.intra_node, intra, own);
    if (watch.found.failed()) {
        return watch.found;
    }
    if (ending.culprit >= 0) {
        ending.culprit = levels.local[static_cast<std::size_t>(ending.culprit)];
    }
    return ending;
}

class Execution {
public:
    Execution(const Levels& levels, const Program& program, const Task& task, const shm::Patience& patience)
        : levels_(levels), task_(task), patience_(patience),
          scratch_(take_scratch(program.nbytes_of(Space::scratch))) {}

    Ending operator()(const IntraNode& one) {
        ++num_rounds_;
        const std::uint64_t place = static_cast<std::uint64_t>(task_.index) * most_instructions + num_rounds_;
        const shm::Task intra{one.kind,       one.dtype,  one.op,  one.root,     at(one.source),
                              at(one.target), one.nbytes, nullptr, one.in_place, task_.fingerprint + place};
        return run_intra_node(levels_, task_, intra, patience_);
    }

    Ending operator()(const InterNode& one) {
        const Ending ending =
            net::walk(levels_.inter_node, *one.plan,
                      {at(one.source), at(one.target), one.in_place, task_.sequence, task_.fingerprint}, patience_);
        return ending.outcome == shm::Outcome::mismatch ? tell_mismatch(levels_, task_, patience_) : ending;
    }

    Ending operator()(const Copy& one) {
        copy_bytes(at(one.target), at(one.source), one.target.nbytes);
        return {};
    }

    Ending operator()(const ToFloat32& one) {
        widen(one.half, at(one.target), at(one.source), one.source.nbytes / item_size(one.half));
        return {};
    }

    Ending operator()(const FromFloat32& one) {
        narrow(one.half, at(one.target), at(one.source), one.target.nbytes / item_size(one.half));
        return {};
    }

    Ending operator()(const Divide& one) {
        const void* operand = at(one.target);
        fold(one.dtype, Op::mean, at(one.target), &operand, 1, one.target.nbytes / item_size(one.dtype), one.divisor);
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
    const shm::Patience& patience_;
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

Ending tell_mismatch(const Levels& levels, const Task& task, const shm::Patience& patience) {
    shm::Task intra{shm::Kind::barrier};
    intra.fingerprint = levels.mismatch_fingerprint;
    const Ending ending = run_intra_node(levels, task, intra, patience);
    return ending.failed() ? ending : Ending{shm::Outcome::mismatch};  // done: all of the host tell of one
}

Ending execute(const Levels& levels, const Program& program, const Task& task, const shm::Patience& patience) {
    patience.begin();
    Execution execution(levels, program, task, patience);
    for (const Instruction& instruction : program.instructions()) {
        if (const Ending ending = std::visit(execution, instruction); ending.failed()) {
            return ending;
        }
    }
    const net::Lock guard = levels.inter_node.mesh().lock();
    levels.inter_node.exit();
    return {};
}

}  // namespace ferrodist::hybrid
