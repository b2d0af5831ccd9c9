// SPDX-License-Identifier: MIT OR Apache-2.0
// Groups as Python sees them: what a call needs to know of one, whatever moves its bytes. Touched only with the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bind/calls.hpp"
#include "bind/collective_call.hpp"
#include "bind/python.hpp"
#include "bind/wait.hpp"
#include "core/messages.hpp"
#include "hybrid/program.hpp"
#include "net/group.hpp"
#include "shm/messages.hpp"

namespace ferrodist::bind {

// How a collective is executed, besides its buffers.
struct KeptPlan {
    std::shared_ptr<const void> plan;  // over TCP a net::Plan, in two levels a hybrid::Program, in shared memory none
    bool is_alias_safe = true;         // whether the result may lie where the input does
};

// How the calls of a group are executed, made by Python when one is first needed.
class PlanCache {
public:
    // `keep` makes a plan of what Python returns.
    const KeptPlan& find(const Collective& one, PyObject* backend, KeptPlan (*keep)(nanobind::object));

private:
    // kind, dtype, op, root, bytes of one rank's array, in place, in order
    using Key = std::tuple<int, int, int, int, std::uint64_t, bool, bool>;
    static constexpr std::size_t most_plans = 256;

    std::map<Key, KeptPlan> plans_;
};

// What collectives need of a group. Python's classes have its address, too: it comes first in what derives from it.
class NativeGroup : core::NonCopyable {
public:
    NativeGroup(int its_rank, int its_size, core::Spins* its_spins, std::shared_ptr<Calls> its_calls)
        : rank(its_rank), size(its_size), spins(its_spins), calls(std::move(its_calls)) {}
    virtual ~NativeGroup() = default;

    // Whether calls may be made from this thread of this process, as far as native code knows.
    virtual bool can_call() const = 0;
    // Whether a collective of this size takes so long that the GIL is let go of.
    virtual bool lets_go_of_gil(std::size_t) const { return true; }
    virtual KeptPlan plan_for(const Collective&, PyObject*) { return {}; }
    virtual core::Status run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) = 0;
    // Whether all ranks are about to begin a call, whose turn it is, or are within a moment.
    virtual bool await_ready(std::uint64_t) { return false; }
    // The object that Works of a group are listed under, which is itself but for one in two levels.
    virtual PyObject* listed_under(PyObject* self) const { return self; }

    // Whose the threads are that wait in its calls, where the ranks of the process are threads; else null.
    virtual const void* owner() const { return nullptr; }

    Place place() const { return {size, rank, calls->reproducible, calls->carried_nbytes}; }

    const int rank, size;
    core::Spins* const spins;
    const std::shared_ptr<Calls> calls;
};

// What messages need of a group besides, and what is asked of it when a call fails.
class MessageGroup : public NativeGroup {
public:
    MessageGroup(int its_rank, int its_size, core::Spins* its_spins, bool keeps)
        : NativeGroup(its_rank, its_size, its_spins, std::make_shared<Calls>()), keeps_gil(keeps) {}

    virtual core::Messages& messages() = 0;
    virtual std::vector<int> find_send_cycle(int peer) = 0;
    // Whether a call with a rank (-1: any) may be made from this thread, and nothing is known to be wrong.
    virtual bool can_call_with(int peer) const = 0;

    // All of these without the GIL.
    virtual std::vector<int> missing() = 0;
    virtual core::Status expire(const core::WaitOptions& options) = 0;
    virtual std::pair<std::uint64_t, std::uint32_t> last_call(int rank) = 0;
    virtual std::int64_t waited_ns(int rank, int for_rank) = 0;
    virtual bool is_gone(int rank) = 0;
    virtual std::optional<std::string> leave_reason_of(int rank) = 0;
    virtual std::optional<std::string> group_error(std::uint64_t sequence) = 0;
    virtual bool set_error(std::uint64_t sequence, std::string_view text) = 0;
    virtual void announce_closing() = 0;
    virtual void leave(std::string_view reason) = 0;
    virtual bool has_left() = 0;

    const bool keeps_gil;  // whether the lock of its messages is held for moments only
};

// What the two transports do alike.
template <class Native>
class GroupOver : public MessageGroup {
public:
    GroupOver(std::shared_ptr<Native> native, core::Spins* its_spins, bool keeps)
        : MessageGroup(native->rank(), native->size(), its_spins, keeps), group(std::move(native)) {}

    std::vector<int> missing() override { return group->missing(); }
    std::pair<std::uint64_t, std::uint32_t> last_call(int of) override { return group->last_call(of); }
    std::int64_t waited_ns(int of, int for_rank) override { return group->waited_ns(of, for_rank); }
    std::optional<std::string> leave_reason_of(int of) override { return group->leave_reason_of(of); }
    std::optional<std::string> group_error(std::uint64_t sequence) override { return group->group_error(sequence); }
    bool set_error(std::uint64_t sequence, std::string_view text) override { return group->set_error(sequence, text); }
    void announce_closing() override { group->announce_closing(); }
    bool has_left() override { return group->has_left(); }

    const std::shared_ptr<Native> group;
};

struct SharedGroup final : GroupOver<shm::Group> {
    explicit SharedGroup(std::shared_ptr<shm::Group> native)
        : GroupOver(native, native->spins(), true), own_messages(*group) {}
    ~SharedGroup() override { calls->progress.stop(); }

    bool can_call() const override;
    bool lets_go_of_gil(std::size_t nbytes) const override;
    core::Status run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) override;
    bool await_ready(std::uint64_t sequence) override { return group->await_ready(sequence); }
    core::Messages& messages() override { return own_messages; }
    std::vector<int> find_send_cycle(int peer) override { return own_messages.find_send_cycle(peer); }
    bool can_call_with(int peer) const override;
    bool is_gone(int of) override { return group->is_gone(of); }
    core::Status expire(const core::WaitOptions& options) override { return group->expire(options); }
    void leave(std::string_view reason) override { group->leave(reason); }

    shm::Messages own_messages;
};

struct TcpGroup final : GroupOver<net::Group> {
    explicit TcpGroup(std::shared_ptr<net::Group> native) : GroupOver(native, native->mesh().spins(), false) {}
    ~TcpGroup() override { calls->progress.stop(); }

    bool can_call() const override;
    KeptPlan plan_for(const Collective& one, PyObject* backend) override;
    core::Status run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) override;
    core::Messages& messages() override { return group->messages(); }
    std::vector<int> find_send_cycle(int peer) override { return group->find_send_cycle(peer); }
    bool can_call_with(int peer) const override;
    bool is_gone(int of) override;
    core::Status expire(const core::WaitOptions& options) override;
    void leave(std::string_view reason) override { group->leave(reason, calls->tickets.ended()); }
    const void* owner() const override { return group->mesh().owner(); }
    net::Lock lock() const { return group->mesh().lock(); }

    PlanCache plans;
};

// A group over TCP whose ranks share memory with the others of their host. The calls are those of the group over TCP.
struct HybridGroup final : NativeGroup {
    HybridGroup(nanobind::handle inter_node, nanobind::handle intra_node, std::vector<int> local_ranks,
                std::uint64_t mismatch_fingerprint)
        : HybridGroup(inter_node, intra_node, nanobind::cast<TcpGroup&>(inter_node),
                      nanobind::cast<SharedGroup&>(intra_node), std::move(local_ranks), mismatch_fingerprint) {}

    bool can_call() const override { return tcp.can_call() && shared.can_call(); }
    KeptPlan plan_for(const Collective& one, PyObject* backend) override;
    core::Status run(const Collective& one, const KeptPlan& plan, const core::WaitOptions& options) override;
    PyObject* listed_under(PyObject*) const override { return kept[0].ptr(); }

    const nanobind::object kept[2];
    TcpGroup& tcp;
    SharedGroup& shared;
    const std::vector<int> local;
    const hybrid::Levels levels;
    PlanCache plans;

private:
    HybridGroup(nanobind::handle inter_node, nanobind::handle intra_node, TcpGroup& its_tcp, SharedGroup& its_shared,
                std::vector<int> local_ranks, std::uint64_t mismatch_fingerprint)
        : NativeGroup(its_tcp.rank, its_tcp.size, its_tcp.spins, its_tcp.calls),
          kept{nanobind::borrow(inter_node), nanobind::borrow(intra_node)}, tcp(its_tcp), shared(its_shared),
          local(std::move(local_ranks)), levels{*shared.group, *tcp.group, local, mismatch_fingerprint} {}
};

inline void require_rank(const NativeGroup& self, int rank) {
    require(rank >= 0 && rank < self.size, "no such rank");
}

// Built-in functions bound to a group, the fast path of a call and of one in flight: (backend, kind, x, out, op, root,
// options) -> the result, or the Work, or NotImplemented for what takes the general path.
nanobind::object bind_call_path(nanobind::handle group);
nanobind::object bind_start_path(nanobind::handle group);

// Some ranks of a group on their way to be a group. The others see it from the first wait on: a signal handler may raise
// as soon as Python has made the object, and they would find that this rank had come and gone.
template <class G, class Split>
class Splitting {
public:
    Splitting(const G& parent, std::vector<int> members, std::uint64_t identity)
        : parent_(parent.group), members_(std::move(members)), identity_(identity) {}

    Split& begun() {
        if (!split_) {
            split_.emplace(parent_, members_, identity_);
        }
        return *split_;
    }

private:
    const decltype(G::group) parent_;
    const std::vector<int> members_;
    const std::uint64_t identity_;
    std::optional<Split> split_;
};

// Adds how some ranks of a group come to be a group.
template <class G, class Split>
nanobind::class_<Splitting<G, Split>> add_split(nanobind::module_& module, const char* name) {
    namespace nb = nanobind;
    using namespace nb::literals;
    using Self = Splitting<G, Split>;
    return nb::class_<Self>(module, name, "Some ranks of a group on their way to be a group.")
        .def("__init__", [](Self* self, const G& parent, std::vector<int> members, std::uint64_t identity) {
            for (const int member : members) {
                require_rank(parent, member);
            }
            new (self) Self(parent, std::move(members), identity);
        }, "parent"_a, "members"_a, "identity"_a)
        .def("wait", [](Self& self, nb::handle deadline, nb::handle poll) {
            Split& split = self.begun();
            return wait_without_gil({deadline, false, poll}, core::no_spins, 0,
                                    [&](const core::WaitOptions& options) { return split.wait(options); });
        }, "deadline"_a, "poll"_a, "Wait for all members; return a status.")
        .def("absent", [](Self& self) {
            Split& split = self.begun();
            return without_gil([&] { return split.absent(); });
        },
             "List the members that have not come.")
        .def("group", [](Self& self) { return new G(self.begun().group()); }, nb::rv_policy::take_ownership,
             "Return the group, when all members have come.");
}

}  // namespace ferrodist::bind
