"""Trainer ranks that live as long as the tests: a process group is a matter of milliseconds, importing Megatron is not.

One process imports everything, does nothing, and forks the ranks. (Not multiprocessing's fork server, of which all
tests of a session have the same one.) Each call forms a process group of its own, with a fresh store, and takes it
apart again, so that any number of ranks up to the pool's can work next.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import multiprocessing as mp
import os
import signal
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


def _parent_of_ranks(pipes: list[Connection], control: Connection) -> None:
    """Forks a rank per pipe, and ends them when the other end of ``control`` is closed."""
    for module in _PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # or collecting a trainer's garbage would look at everything imported, for a third of a second
    pids = []
    for rank, pipe in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            control.close()
            for other in pipes:
                if other is not pipe:
                    other.close()  # so that the end of one rank is the end of its pipe
            _work(rank, pipe)
            os._exit(0)
        pids.append(pid)
    for pipe in pipes:
        pipe.close()
    with contextlib.suppress(EOFError):
        control.recv()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # ours until it is waited for, whether it runs or not
        os.waitpid(pid, 0)


def _work(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            target, world_size, store, args = pipe.recv()
        except EOFError:
            return
        patience = datetime.timedelta(seconds=100)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=patience
        )
        try:
            answer = (True, target(rank, *args))
        except BaseException:  # noqa: BLE001 - the tests raise it with the rank's traceback
            pipe.send((False, traceback.format_exc()))  # before the others lose this rank
            return
        dist.destroy_process_group()
        gc.collect()  # modules of Megatron are in cycles, and hold shared memory
        pipe.send(answer)


class RankPool:
    """``size`` processes, started at the first call and again after one that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parent: tuple[BaseProcess, Connection] | None = None
        self._pipes: list[Connection] = []

    def run(self, world_size: int, target: Callable[..., Any], *args: Any, timeout: float = 150) -> list[Any]:
        """``target(rank, *args)`` on each of ``world_size`` ranks with gloo initialised; the results by rank.

        Ranks that fail within a second of the first one fail the call, with their tracebacks; so does one that says
        nothing for ``timeout`` seconds. The processes are then ended: the others may wait for those.
        """
        if self._parent is None:
            self._start()
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                pipes = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
                for pipe in pipes:
                    pipe.send((target, world_size, f"{folder}/store", args))
                while len(answers) < world_size:
                    waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
                    ready = wait(waiting, max(deadline - time.monotonic(), 0))
                    for pipe in ready:
                        assert isinstance(pipe, Connection)
                        try:
                            succeeded, answer = pipe.recv()
                        except (EOFError, ConnectionResetError):
                            succeeded, answer = False, "its process ended"
                        answers[pipes[pipe]] = answer
                        if not succeeded:
                            failures.append(f"rank {pipes[pipe]} of {world_size}: {answer}")
                            deadline = min(deadline, time.monotonic() + 1)
                    if not ready:
                        silent = f"ranks {[pipes[pipe] for pipe in waiting]} said nothing within {timeout} s"
                        raise AssertionError("\n".join(failures) or silent)
                assert not failures, "\n".join(failures)
            except BaseException:
                self.close()
                raise
        return [answers[rank] for rank in range(world_size)]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        ours, theirs = zip(*(context.Pipe() for _ in range(self.size)), strict=True)
        control, their_control = context.Pipe()
        parent = context.Process(target=_parent_of_ranks, args=(list(theirs), their_control), daemon=True)
        parent.start()
        for pipe in (*theirs, their_control):
            pipe.close()
        self._parent, self._pipes = (parent, control), list(ours)

    def close(self) -> None:
        """End all ranks, whatever they are at."""
        if self._parent is None:
            return
        parent, control = self._parent
        control.close()
        parent.join(60)  # it may still import
        parent.kill()
        for pipe in self._pipes:
            pipe.close()
        self._parent, self._pipes = None, []
