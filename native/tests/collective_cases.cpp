// SPDX-License-Identifier: MIT OR Apache-2.0
#include "collective_cases.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>

#include "check.hpp"
#include "ranks.hpp"

namespace ferrodist::tests {
namespace {

using shm::Kind;

// -- elements ----------------------------------------------------------------------------------------

struct Half {
    std::uint16_t bits;
};
struct Boolean {
    std::uint8_t byte;
};

// Small whole numbers only: exact in 16 bits, and so are their sums.
Half half_of(int number) {
    int exponent = 0;
    while (number >> (exponent + 1) != 0) {
        ++exponent;
    }
    const int mantissa = (number << (10 - exponent)) & 0x3FF;
    return {static_cast<std::uint16_t>(number == 0 ? 0 : (exponent + 15) << 10 | mantissa)};
}

std::uint64_t mix(std::uint64_t salt, std::size_t rank, std::size_t index) {
    std::uint64_t bits = (salt + rank * 0x632BE59BD9B4E019 + index) * 0x9E3779B97F4A7C15;
    return bits ^ bits >> 29;
}

// What is reduced for each type of element, and what comes of it.
template <class T>
struct Accumulated;
template <>
struct Accumulated<float> {  // no sum of these is exact: the order shows
    static float value(std::uint64_t bits) { return static_cast<float>(bits & 0xFFFF) * 1.1e-3f - 20.0f; }
    static float result(float accumulated) { return accumulated; }
};
template <>
struct Accumulated<std::int64_t> {
    static std::int64_t value(std::uint64_t bits) { return static_cast<std::int64_t>(bits) >> 8; }
    static std::int64_t result(std::int64_t accumulated) { return accumulated; }
};
template <>
struct Accumulated<Half> {
    static int value(std::uint64_t bits) { return static_cast<int>(bits % 8); }
    static Half result(int accumulated) { return half_of(accumulated); }
};
template <>
struct Accumulated<Boolean> {
    static bool value(std::uint64_t bits) { return bits % 4 == 0; }
    static Boolean result(bool accumulated) { return {static_cast<std::uint8_t>(accumulated ? 1 : 0)}; }
};

template <class A>
A combine(Op op, A left, A right) {
    switch (op) {
        case Op::min: return std::min(left, right);
        case Op::max: return std::max(left, right);
        default:
            if constexpr (std::is_same_v<A, bool>) {
                return left || right;
            } else {
                return left + right;
            }
    }
}

// -- what every rank has, and what it should get -------------------------------------------------------

class Expectation {
public:
    Expectation(const Case& one, int world) : one_(one), world_(static_cast<std::size_t>(world)) {}

    std::size_t block(std::size_t index) const { return one_.counts.empty() ? one_.count : one_.counts[index]; }
    std::size_t pair(std::size_t from, std::size_t to) const {
        return one_.counts.empty() ? one_.count : one_.counts[from * world_ + to];
    }
    std::size_t start(std::size_t rank) const {
        std::size_t sum = 0;
        for (std::size_t i = 0; i < rank; ++i) {
            sum += block(i);
        }
        return sum;
    }
    std::size_t start_in_source(std::size_t from, std::size_t to) const {
        std::size_t sum = 0;
        for (std::size_t i = 0; i < to; ++i) {
            sum += pair(from, i);
        }
        return sum;
    }

    bool has_source(std::size_t rank) const {
        const bool is_root = rank == static_cast<std::size_t>(one_.root);
        return one_.kind != Kind::barrier && ((one_.kind != Kind::broadcast && one_.kind != Kind::scatter) || is_root);
    }
    bool has_target(std::size_t rank) const {
        const bool is_root = rank == static_cast<std::size_t>(one_.root);
        return one_.kind != Kind::barrier && ((one_.kind != Kind::reduce && one_.kind != Kind::gather) || is_root) &&
               (one_.kind != Kind::exscan || rank > 0);
    }
    std::size_t source_count(std::size_t rank) const {
        switch (one_.kind) {
            case Kind::all_gather:
            case Kind::gather: return block(rank);
            case Kind::scatter:
            case Kind::reduce_scatter: return start(world_);
            case Kind::all_to_all: return start_in_source(rank, world_);
            default: return one_.count;
        }
    }
    // Where the target begins in the source, or the source in the target, where they share memory.
    std::size_t shift(std::size_t rank) const {
        switch (one_.kind) {
            case Kind::all_gather:
            case Kind::gather:
            case Kind::scatter:
            case Kind::reduce_scatter: return start(rank);
            default: return 0;
        }
    }

    template <class T>
    std::vector<T> source(std::size_t rank) const {
        std::vector<T> all(source_count(rank));
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[i] = value<T>(rank, i);
        }
        return all;
    }

    template <class T>
    std::vector<T> target(std::size_t rank) const {
        std::vector<T> all;
        const auto copy = [&](std::size_t from, std::size_t first, std::size_t count) {
            for (std::size_t i = 0; i < count; ++i) {
                all.push_back(value<T>(from, first + i));
            }
        };
        switch (one_.kind) {
            case Kind::broadcast: copy(static_cast<std::size_t>(one_.root), 0, one_.count); break;
            case Kind::scatter: copy(static_cast<std::size_t>(one_.root), start(rank), block(rank)); break;
            case Kind::all_gather:
            case Kind::gather:
                for (std::size_t from = 0; from < world_; ++from) {
                    copy(from, 0, block(from));
                }
                break;
            case Kind::all_to_all:
                for (std::size_t from = 0; from < world_; ++from) {
                    copy(from, start_in_source(from, rank), pair(from, rank));
                }
                break;
            default:
                const bool is_cut = one_.kind == Kind::reduce_scatter;
                for (std::size_t i = 0; i < (is_cut ? block(rank) : one_.count); ++i) {
                    all.push_back(accumulated<T>((is_cut ? start(rank) : 0) + i, num_reduced(rank)));
                }
        }
        return all;
    }

private:
    template <class T>
    T value(std::size_t rank, std::size_t index) const {
        return Accumulated<T>::result(Accumulated<T>::value(mix(one_.salt, rank, index)));
    }
    std::size_t num_reduced(std::size_t rank) const {
        return one_.kind == Kind::scan ? rank + 1 : one_.kind == Kind::exscan ? rank : world_;
    }
    template <class T>
    T accumulated(std::size_t index, std::size_t num_ranks) const {
        auto left = Accumulated<T>::value(mix(one_.salt, 0, index));
        for (std::size_t rank = 1; rank < num_ranks; ++rank) {
            left = combine(one_.op, left, Accumulated<T>::value(mix(one_.salt, rank, index)));
        }
        if constexpr (std::is_same_v<T, float>) {
            left = one_.op == Op::mean ? left / static_cast<float>(world_) : left;
        }
        return Accumulated<T>::result(left);
    }

    const Case& one_;
    const std::size_t world_;
};

// -- memory ----------------------------------------------------------------------------------------

// Memory of exactly this size: the sanitizer guards what is private, zeroes guard the rest.
class Buffer {
public:
    Buffer(shm::Arena& arena, std::size_t nbytes, std::size_t shift, bool is_shared)
        : arena_(arena), nbytes_(nbytes + shift), shift_(shift) {
        if (is_shared) {
            offset_ = arena.allocate(nbytes_);
            start_ = arena.base() + *offset_;
        } else {
            heap_.reset(new std::byte[nbytes_]);
            start_ = heap_.get();
        }
    }
    ~Buffer() {
        if (offset_) {
            CHECK(std::all_of(start_ + nbytes_, start_ + (nbytes_ + 4095) / 4096 * 4096,
                              [](std::byte one) { return one == std::byte{0}; }));
            arena_.free(*offset_);
        }
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const { return start_ + shift_; }
    void scribble() const { std::memset(start_, 0xEE, nbytes_); }

private:
    shm::Arena& arena_;
    const std::size_t nbytes_, shift_;
    std::unique_ptr<std::byte[]> heap_;
    std::optional<std::size_t> offset_;
    std::byte* start_ = nullptr;
};

template <class T>
bool holds(const std::byte* memory, const std::vector<T>& expected) {
    return expected.empty() || std::memcmp(memory, expected.data(), expected.size() * sizeof(T)) == 0;
}

template <class T>
void put(std::byte* memory, const std::vector<T>& values) {
    if (!values.empty()) {
        std::memcpy(memory, values.data(), values.size() * sizeof(T));
    }
}

// -- one call on one rank --------------------------------------------------------------------------

template <class T>
class RankCase {
public:
    RankCase(shm::Group& group, const Case& one)
        : group_(group), one_(one), me_(static_cast<std::size_t>(group.rank())), plan_(one, group.size()),
          source_(plan_.has_source(me_) ? plan_.source<T>(me_) : std::vector<T>{}),
          target_(plan_.has_target(me_) ? plan_.target<T>(me_) : std::vector<T>{}) {}

    core::Status run(std::uint64_t sequence) {
        place();
        for (const std::uint64_t count : one_.counts) {
            blocks_.push_back(count * sizeof(T));
        }
        task_.blocks = blocks_.empty() ? nullptr : blocks_.data();
        task_.nbytes = one_.count * sizeof(T);
        task_.fingerprint = one_.salt;
        CountingHook hook;
        const core::Status status = shm::run(group_, task_, options_of(hook, sequence, very_long, group_.spins()));
        check(status);
        return status;
    }

private:
    bool is_in_place() const { return one_.in_place && plan_.has_source(me_) && plan_.has_target(me_); }

    void place() {
        const std::size_t shift = one_.is_misaligned ? sizeof(T) : 0;
        shm::Arena& arena = group_.world().arena();
        const std::size_t start = plan_.shift(me_) * sizeof(T);
        task_.in_place = is_in_place();
        const std::size_t larger = std::max(source_.size(), target_.size()) * sizeof(T);
        if (plan_.has_source(me_)) {
            const std::size_t nbytes = task_.in_place ? larger : source_.size() * sizeof(T);
            first_.emplace(arena, nbytes, shift, one_.shared_sources[me_]);
            first_->scribble();
            source_start_ = first_->data() + (task_.in_place && source_.size() < target_.size() ? start : 0);
            put(source_start_, source_);
            task_.source = source_start_;
        }
        if (task_.in_place) {
            task_.target = first_->data() + (source_.size() > target_.size() ? start : 0);
        } else if (plan_.has_target(me_)) {
            second_.emplace(arena, target_.size() * sizeof(T), shift, one_.shared_targets[me_]);
            second_->scribble();
            task_.target = second_->data();
        }
    }

    void check(const core::Status& status) {
        const bool is_source_kept = task_.in_place || holds(source_start_, source_);
        if (first_ && !task_.in_place) {
            first_->scribble();
        }
        const bool is_target_right = holds(task_.target, target_);
        if (status.failed() || !is_source_kept || !is_target_right) {
            std::ostringstream text;
            text << one_.text() << " on rank " << me_ << " of " << group_.size() << ": " << status.code
                 << (is_source_kept ? "" : ", the input has changed") << (is_target_right ? "" : ", wrong result");
            fail(__FILE__, __LINE__, text.str());
        }
    }

    shm::Group& group_;
    const Case& one_;
    const std::size_t me_;
    const Expectation plan_;
    const std::vector<T> source_, target_;
    std::optional<Buffer> first_, second_;
    std::byte* source_start_ = nullptr;
    std::vector<std::uint64_t> blocks_;
    shm::Task task_{one_.kind, one_.dtype, one_.op, one_.root};
};

bool is_cut_by_rank(Kind kind) {
    return kind == Kind::scatter || kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}

bool can_be_uneven(Kind kind) {
    return kind == Kind::gather || kind == Kind::all_gather || is_cut_by_rank(kind);
}

}  // namespace

std::string Case::text() const {
    constexpr const char* names[] = {"allreduce", "broadcast",      "reduce",     "all_gather", "gather",
                                     "scatter",   "reduce_scatter", "all_to_all", "barrier", "scan", "exscan"};
    std::ostringstream text;
    text << names[static_cast<int>(kind)] << " of " << count << " x " << item_size(dtype) << " bytes";
    for (const std::uint64_t one : counts) {
        text << " " << one;
    }
    text << ", dtype " << static_cast<int>(dtype) << ", op " << static_cast<int>(op) << ", root " << root
         << (in_place ? ", in place" : "") << (is_misaligned ? ", misaligned" : "") << ", shared ";
    for (const auto* side : {&shared_sources, &shared_targets}) {
        for (const bool is_shared : *side) {
            text << (is_shared ? "1" : "0");
        }
        text << (side == &shared_sources ? "->" : "");
    }
    return text.str();
}

Case make_case(Random& random, int world, Kind kind, DType dtype, std::size_t nbytes, Memory memory) {
    Case one{kind, dtype};
    const auto size = static_cast<std::size_t>(world);
    constexpr Op number_ops[] = {Op::sum, Op::min, Op::max}, bool_ops[] = {Op::sum, Op::bor, Op::max};
    const std::size_t which = random() % 3;
    one.op = dtype == DType::boolean ? bool_ops[which] : number_ops[which];
    if (dtype == DType::float32 && kind != Kind::scan && kind != Kind::exscan && random() % 4 == 0) {
        one.op = Op::mean;
    }
    one.root = static_cast<int>(random() % size);
    one.count = nbytes / item_size(dtype) / (is_cut_by_rank(kind) ? size : 1);
    const bool is_uneven = can_be_uneven(kind) && random() % 2 == 0;
    if (is_uneven) {
        one.counts.resize(kind == Kind::all_to_all ? size * size : size);
        for (std::uint64_t& count : one.counts) {
            count = random() % 4 == 0 ? 0 : random() % 2 == 0 ? one.count : random() % (one.count + 1);
        }
        one.count = 0;
    }
    one.in_place = random() % 2 == 0 && !(is_uneven && kind == Kind::all_to_all);
    one.is_misaligned = random() % 4 == 0;
    for (int rank = 0; rank < world; ++rank) {
        one.shared_sources.push_back(memory == Memory::all_shared || (memory == Memory::any && random() % 2));
        one.shared_targets.push_back(memory == Memory::all_shared || (memory == Memory::any && random() % 2));
    }
    one.salt = random();
    return one;
}

core::Status run_case(shm::Group& group, const Case& one, std::uint64_t sequence) {
    switch (one.dtype) {
        case DType::float32: return RankCase<float>(group, one).run(sequence);
        case DType::int64: return RankCase<std::int64_t>(group, one).run(sequence);
        case DType::float16: return RankCase<Half>(group, one).run(sequence);
        default: return RankCase<Boolean>(group, one).run(sequence);
    }
}

}  // namespace ferrodist::tests
