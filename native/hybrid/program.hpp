// SPDX-License-Identifier: MIT OR Apache-2.0
// Program: one rank's part of a collective in two levels, as plain data: what the ranks of its host do in
// shared memory, and what ranks on different hosts do over TCP.
//
// Every program begins with a collective of the ranks of this host, which compares what they have called. A
// rank that finds a mismatch between hosts still comes to the next collective of its host, with
// a fingerprint that nobody else has: so those stay in step, and all of the host find out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "reduce/reduce.hpp"
#include "net/group.hpp"
#include "net/plan.hpp"
#include "shm/collectives.hpp"

namespace ferrodist::hybrid {

using core::Status;

// Some bytes of the caller's arrays, or of memory that the program needs besides them.
enum class Space : int { none, input, output, scratch };
struct Span {
    Space space = Space::none;
    std::uint64_t begin = 0, nbytes = 0;
};

// A collective of the ranks of this host; the root is a rank among them.
struct IntraNode {
    shm::Kind kind;
    DType dtype;
    Op op;
    int root;
    Span source, target;
    std::uint64_t nbytes;  // as in shm::Task
    bool in_place;
};

// A collective of ranks on different hosts.
struct InterNode {
    std::shared_ptr<const net::Plan> plan;
    Span source, target;
    bool in_place;
};

// What a rank does by itself.
struct Copy {
    Span source, target;
};
struct ToFloat32 {
    DType half;
    Span source, target;
};
struct FromFloat32 {
    DType half;
    Span source, target;
};
struct Divide {
    DType dtype;
    Span target;
    std::uint64_t divisor;
};

using Instruction = std::variant<IntraNode, InterNode, Copy, ToFloat32, FromFloat32, Divide>;

class Program {
public:
    void add(Instruction instruction);

    const std::vector<Instruction>& instructions() const { return instructions_; }
    // How many bytes of the caller's arrays it reads and writes, and needs besides them.
    std::uint64_t nbytes_of(Space space) const { return nbytes_[static_cast<std::size_t>(space)]; }

private:
    void note(const Span& span);

    std::vector<Instruction> instructions_;
    std::uint64_t nbytes_[4] = {};
};

// The groups of the two levels.
struct Levels {
    shm::Group& intra_node;
    net::Group& inter_node;
    const std::vector<int>& local;       // the ranks of this host, in the group of all
    std::uint64_t mismatch_fingerprint;  // of a rank that comes only to tell of a mismatch
};

// What one collective of a call works on.
struct Task {
    const std::byte* input;
    std::byte* output;
    std::uint32_t call_kind;  // what the call is, for those who ask
    std::uint64_t sequence, fingerprint;
    int index;  // among the collectives of its call
};

// Executes a program; failed ranks are numbers in the group of all. After a failure this rank is still inside
// the call, and leaves it when it has told the others.
Status execute(const Levels& levels, const Program& program, const Task& task, const core::WaitOptions& options);

// Comes to the next collective of this host with a mismatch that was found elsewhere. Ends with mismatch when all of
// the host know, or with what came between.
Status tell_mismatch(const Levels& levels, const Task& task, const core::WaitOptions& options);

}  // namespace ferrodist::hybrid
