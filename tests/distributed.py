"""Run a function on several real processes that form a gloo process group."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any


def _entry(
    target: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=100),
        )
        results.put((rank, True, target(rank, *args)))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent raises it with the rank's traceback
        results.put((rank, False, traceback.format_exc()))


def run_ranks(
    world_size: int, target: Callable[..., Any], *args: Any, timeout: float = 150, context: Any = None
) -> list[Any]:
    """Call ``target(rank, *args)`` in ``world_size`` fresh processes with gloo initialised; return results by rank.

    ``target`` must be importable (a module-level function) and return something picklable. The first failing rank's
    traceback is raised here at once; a rank that says nothing within ``timeout`` seconds fails the call. ``context``:
    how processes are started, as freshly imported Pythons unless it says otherwise.
    """
    context = context or mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_entry, args=(target, rank, world_size, store, results, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < world_size:
                try:
                    rank, ok, value = results.get(timeout=timeout)
                except queue.Empty:
                    missing = sorted(set(range(world_size)) - set(answers))
                    raise AssertionError(f"ranks {missing} said nothing within {timeout} s") from None
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                answers[rank] = value
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    return [answers[rank] for rank in range(world_size)]
