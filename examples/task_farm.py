# SPDX-License-Identifier: MIT OR Apache-2.0
"""Distribute tasks from rank 0 to idle workers; if a worker dies, its task is repeated.

    python examples/task_farm.py

Rank 0 receives results from any rank, as they arrive. When a worker is lost, its task is assigned
again, and the other ranks make a group without it. Under ``ferrodist run`` use
``--keep-survivors``.
"""

import os
import signal
from collections import deque

import ferrodist


def compute(task):
    return sum(number * number for number in range(task))


def without(group, lost):
    """Make a group of the survivors; more ranks may be lost meanwhile."""
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
    """Receive the pending results of the other workers, and tell them which rank is lost."""
    for rank in range(1, group.world_size):
        if rank != lost:
            if rank in busy:
                yield ferrodist.recv_object(rank, group)
            ferrodist.send_object(("lost", [lost]), rank, group)


def work(group):
    """Process tasks from rank 0 until it sends None."""
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
        # After a loss, the other ranks have this many seconds (grace).
        ferrodist.run(farm, ranks=4, args=(range(100, 130),), grace=30.0)
    except ferrodist.RankLost as error:
        print(f"RankLost: {error}".splitlines()[0])
