# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rank 0 hands out tasks to whoever is free; a worker that dies costs its task some time, no more.

    python examples/task_farm.py

Answers are received from any rank, as they come. When a worker is lost, the task that it had is
handed out again, and the others make a group without it. Under ``ferrodist run`` a job goes on
with ``--keep-survivors``.
"""

import os
import signal
from collections import deque

import ferrodist


def compute(task):
    return sum(number * number for number in range(task))


def without(group, lost):
    """Make a group of those who are left; while it is made, more of them may be lost."""
    while True:
        try:
            return group.split([rank for rank in range(group.world_size) if rank not in lost])
        except ferrodist.RankLost as error:
            lost = [*lost, error.rank]


def hand_out(group, tasks):
    """Return the results of all tasks."""
    todo, results = deque(enumerate(tasks)), {}
    free, busy = deque(range(1, group.world_size)), {}
    while len(results) < len(tasks):
        try:
            while todo and free:
                ferrodist.send_object(todo[0], free[0], group)
                busy[free.popleft()] = todo.popleft()
            answer, status = ferrodist.recv_object(ferrodist.ANY_SOURCE, group, with_status=True)
        except ferrodist.RankLost as error:
            print(f"worker {error.rank} is lost, {group.world_size - 2} go on")
            results.update(collect(group, busy, error.rank))
            todo = deque(item for item in enumerate(tasks) if item[0] not in results)
            group = without(group, [error.rank])
            free, busy = deque(range(1, group.world_size)), {}
        else:
            results.update([answer])
            busy.pop(status.source)
            free.append(status.source)
    for rank in range(1, group.world_size):
        ferrodist.send_object(None, rank, group)
    return [results[number] for number in range(len(tasks))]


def collect(group, busy, lost):
    """Receive what the other workers are still at, and tell them who is lost."""
    for rank in range(1, group.world_size):
        if rank != lost:
            if rank in busy:
                yield ferrodist.recv_object(rank, group)
            ferrodist.send_object(("lost", [lost]), rank, group)


def work(group):
    """Do what rank 0 says until it says no more."""
    while (task := ferrodist.recv_object(0, group)) is not None:
        number, content = task
        if number == "lost":
            group = without(group, content)
        elif group.world_size == 4 and group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        else:
            ferrodist.send_object((number, compute(content)), 0, group)


def farm(backend, tasks):
    if backend.rank > 0:
        work(backend)
    else:
        is_same = hand_out(backend, tasks) == [compute(task) for task in tasks]
        print(f"{len(tasks)} tasks done, as on one rank: {is_same}")


if __name__ == "__main__":
    try:
        # The others have so many seconds after a loss.
        ferrodist.run(farm, ranks=4, args=(range(100, 130),), grace=30.0)
    except ferrodist.RankLost as error:
        print(f"RankLost: {error}".splitlines()[0])
