// SPDX-License-Identifier: MIT OR Apache-2.0
// Arrays as messages carry them: what the header says, and the array that a receiver makes of it.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "bind/convert.hpp"
#include "core/match_queue.hpp"
#include "core/request.hpp"

namespace ferrodist::bind {

// Dtype, number of axes, lengths, and what kind of array it is: as pack_array_header of ferrodist.backends.framing.
class ArrayHeader {
public:
    ArrayHeader(const ArrayView& array, ArrayKind kind);
    explicit ArrayHeader(const InputArray& array) : ArrayHeader(array, array.sent_kind()) {}

    core::Bytes all() const { return {bytes_.data(), nbytes_}; }
    // Without the kind, which need not be what a receiver has: what it compares.
    core::Bytes form() const { return {bytes_.data(), nbytes_ - 1}; }

private:
    std::array<std::byte, 3 + 8 * max_axes> bytes_;
    std::size_t nbytes_;
};

struct ReleaseMemory {
    bool is_warm = false;
    void operator()(std::byte* memory) const;
};

// An array that is made of whatever message comes.
class ReceivedArray final : public core::Place {
public:
    std::byte* make(core::Bytes header, std::uint64_t nbytes) override;
    // The array, once the message is there; called once, with the GIL.
    nanobind::object finish();

private:
    nanobind::object over(DType dtype, int num_axes, const std::ptrdiff_t* shape);
    nanobind::object made_by_python();

    ArrayView form_;
    ArrayKind kind_ = ArrayKind::none;
    std::unique_ptr<std::byte[], ReleaseMemory> memory_;
    alignas(16) std::byte small_[256];  // for what is copied sooner than memory is had
};

// Where a receive puts its message: the caller's array, a new one like another, or one made of what comes.
class ReceiveTarget {
public:
    // Sets what the request says of it. False: the general path.
    bool read(core::Request& receive, PyObject* out, PyObject* like, bool with_status);
    bool overlaps(const InputArray& x) const;
    // What the call returns, once the message is there.
    nanobind::object finish(const core::Request& receive);

private:
    nanobind::object filled(const ArrayView& form);

    OutputArray array_;
    ReceivedArray received_;
    nanobind::object like_;
    bool is_known_ = false, with_status_ = false;
};

}  // namespace ferrodist::bind
