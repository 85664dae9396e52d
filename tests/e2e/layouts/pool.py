"""Trainer ranks that live as long as the tests: a process group is a matter of milliseconds, importing Megatron is not.

The processes are forked from a server that has imported everything and done nothing. Each call forms a process group
of its own, with a fresh store, and takes it apart again, so that any number of ranks up to the pool's can work next.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOAD = [
    "vime.backends.megatron_utils.trainer",
    "vime.backends.megatron_utils.update_weight.update_weight_from_tensor",
    "tests.unit.backends.megatron_utils.trainer_helpers",
]


def _rank(rank: int, pipe: Connection) -> None:
    for module in _PRELOAD:
        importlib.import_module(module)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # or collecting the garbage of a trainer would look at everything imported, for a third of a second
    while True:
        try:
            target, world_size, store, args = pipe.recv()
        except EOFError:
            return
        try:
            patience = datetime.timedelta(seconds=100)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=patience
            )
            try:
                answer = target(rank, *args)
            finally:
                dist.destroy_process_group()
            gc.collect()  # modules of Megatron are in cycles, and hold shared memory
            pipe.send((True, answer))
        except Exception:  # noqa: BLE001 - the parent raises it with the rank's traceback
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """``size`` processes, started at the first call and again after one that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, world_size: int, target: Callable[..., Any], *args: Any, timeout: float = 150) -> list[Any]:
        """``target(rank, *args)`` on each of ``world_size`` ranks with gloo initialised; the results by rank.

        The first rank that fails fails the call, with its traceback; so does one that says nothing for ``timeout``
        seconds. The processes are then ended: the others may wait for that one.
        """
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(self.size)]
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world_size])}
                for pipe in pipes:
                    pipe.send((target, world_size, f"{folder}/store", args))
                while len(answers) < world_size:
                    waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
                    ready = wait(waiting, max(deadline - time.monotonic(), 0))
                    assert ready, f"ranks {[pipes[pipe] for pipe in waiting]} said nothing within {timeout} s"
                    for pipe in ready:
                        assert isinstance(pipe, Connection)
                        try:
                            succeeded, answer = pipe.recv()
                        except EOFError:
                            succeeded, answer = False, "its process ended"
                        assert succeeded, f"rank {pipes[pipe]} of {world_size}: {answer}"
                        answers[pipes[pipe]] = answer
            except BaseException:
                self.close()
                raise
        return [answers[rank] for rank in range(world_size)]

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_rank, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []
