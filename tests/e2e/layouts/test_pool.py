"""The pool of ranks itself: it can be used again after whatever happened in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.e2e.layouts.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def add_up(rank: int, number: int) -> tuple[int, float]:
    total = torch.full((1,), float(rank + number))
    dist.all_reduce(total)
    return os.getpid(), float(total)


def fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("one of us")
    dist.barrier()


def test_any_number_of_ranks_and_any_failure(pool: RankPool) -> None:
    pids: set[int] = set()
    for world_size in (4, 1, 2):
        answers = pool.run(world_size, add_up, 10)
        assert {total for _, total in answers} == {sum(range(world_size)) + 10.0 * world_size}
        pids |= {pid for pid, _ in answers}
    assert len(pids) == 4
    for how, message in (
        ("raises", "rank 1 of 3: .*ValueError: one of us"),
        ("dies", "rank 1 of 3: its process ended"),
    ):
        with pytest.raises(AssertionError, match=f"(?s){message}"):
            pool.run(3, fail, how)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        pids = {pid for pid, _ in pool.run(4, add_up, 1)}
        assert len(pids) == 4
