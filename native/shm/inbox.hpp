// SPDX-License-Identifier: MIT OR Apache-2.0
// Inbox: the receiver's side of the messages from one other rank to this one.
//
// Several threads may receive, each with its own tag. One of them at a time reads the queue, as long
// as it waits; what it finds for others it sets aside, where they look.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "shm/group.hpp"
#include "shm/queue.hpp"
#include "shm/transfer.hpp"

namespace ferrodist::shm {

// What one call of receive wants, and what it gets.
struct Wanted {
    std::uint32_t tag;
    ByteView header;
    std::byte* target;
    std::size_t nbytes;
    std::vector<std::byte>& found;  // the header, if it was another one

    Transfer* transfer = nullptr;  // claimed: the payload has to be fetched from it
};

class Inbox {
public:
    // A thread's turn at reading the queue; it begins and ends with try_begin and the destructor.
    class Turn {
    public:
        explicit Turn(Inbox& inbox) : inbox_(inbox), lock_(inbox.reading_, std::defer_lock) {}
        ~Turn() { end(); }

        bool has_begun() const { return lock_.owns_lock(); }
        bool try_begin() { return lock_.owns_lock() || lock_.try_lock(); }
        void end();

    private:
        Inbox& inbox_;
        std::unique_lock<std::mutex> lock_;
    };

    Inbox(Group& group, int peer) : group_(group), peer_(peer) {}

    // The bell that tells of everything this inbox may be waited for.
    Bell& bell() const;
    // Receives the oldest message with the tag that is wanted; none if it has not come.
    std::optional<Ending> fetch(Turn& turn, Wanted& wanted);
    // Whether fetch() should look again. What is not in turn becomes so if it can.
    bool is_ready(Turn& turn, std::uint32_t tag);
    // The tags of what has come and nobody received.
    std::vector<std::uint32_t> waiting_tags();

private:
    // A message set aside.
    struct Parcel {
        explicit Parcel(const Message& message);
        Message message() const;

        Record::Kind kind;
        std::uint32_t tag;
        std::size_t body_nbytes;
        std::vector<std::byte> bytes;  // body, then header
    };

    QueueReader* reader();
    std::optional<Ending> read(Wanted& wanted);
    std::optional<Ending> accept(const Message& message, Wanted& wanted);
    std::optional<Ending> accept_offer(const Message& message, Wanted& wanted);
    Transfer* find_transfer(const Message& message) const;
    bool has_aside(std::uint32_t tag);
    std::optional<Parcel> take_aside(std::uint32_t tag);
    void set_aside(const Message& message);
    void read_all();

    Group& group_;
    int peer_;
    std::mutex reading_;  // held by the thread whose turn it is
    std::optional<QueueReader> reader_;
    std::mutex mutex_;
    std::map<std::uint32_t, std::deque<Parcel>> aside_;  // by tag, oldest first; no list is empty
    std::atomic<std::size_t> num_aside_{0};
};

// Says how many pieces of a transfer are free to be filled again.
void set_emptied(Transfer& transfer, std::uint32_t emptied, Group& group, int peer);
// Ends a transfer that was claimed or withdrawn: nothing of it is touched any more. False if the
// sender has given it up: then what was copied may be anything.
bool end_transfer(Transfer& transfer, Group& group, int peer);

}  // namespace ferrodist::shm
