"""Trainer ranks for weight_sync_layouts.py: two processes with parameters of real names, shapes and cuts.

Not the tests' pool (tests/e2e/layouts/pool.py), which forks: here each process starts with its own view of the GPUs.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import multiprocessing as mp
import os
import re
import subprocess
import tempfile
import time
import traceback
from contextlib import suppress
from typing import Any

import torch

from benchmarks.known_weights import KnownWeights
from benchmarks.weight_sync import make_parameters
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec
from vime.types import EngineAddress


@dataclasses.dataclass(frozen=True)
class View:
    """Which GPUs a process sees, in which order, and how torch allocates."""

    name: str = "own GPU"
    trainer: str = "own"  # "own", "both" or "reversed": rank i works on GPU i in any case
    expandable: bool = False

    def env(self, rank: int) -> dict[str, str]:
        seen = {"own": str(rank), "both": "0,1", "reversed": "1,0"}[self.trainer]
        alloc = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if self.expandable else {}
        return {"CUDA_VISIBLE_DEVICES": seen, **alloc}

    def local_device(self, rank: int) -> int:
        return {"own": 0, "both": rank, "reversed": 1 - rank}[self.trainer]


OWN = View()
REST = 0.2  # seconds before an update that is measured: a training step takes longer, and links sleep after 50 ms
_updating: Any = None  # Ranks.updating, in a rank's process


class Ranks:
    """Two trainer processes that do as they are told: (function, arguments) in, result or error out.

    ``updating`` is set when, in an update that is measured, an engine's workers are told to take their weights."""

    def __init__(self, view: View, device: str) -> None:
        self.view = view
        context = mp.get_context("spawn")
        self.updating = context.Event()
        self._pipes, self.processes = [], []
        before = dict(os.environ)
        for rank in range(2):
            ours, theirs = context.Pipe()
            os.environ.update(view.env(rank) if device == "cuda" else {})  # a spawned process reads it at its start
            args = (rank, view.local_device(rank), device, theirs, self.updating)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        os.environ.clear()
        os.environ.update(before)

    def start(self, count: int, work: Any, *args: Any) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as store:
            pass
        os.unlink(store.name)
        for rank in range(count):
            with suppress(BrokenPipeError):  # it has died; result() says so
                self._pipes[rank].send((count, store.name, work, args))

    def result(self, rank: int, timeout: float = 150.0) -> Any:
        if not self._pipes[rank].poll(timeout):
            self.close()  # or its late answer would be taken for that of the next case
            return {"error": f"rank {rank} said nothing for {timeout:.0f} s"}
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return {"error": f"rank {rank} has died"}

    def wait_updating(self, timeout: float) -> bool:
        """Wait for ``updating``; not for longer than until a rank has ended without."""
        end = time.monotonic() + timeout
        while not self.updating.wait(0.2):
            if time.monotonic() > end or any(pipe.poll(0) for pipe in self._pipes):
                return False
        return True

    def run(self, count: int, work: Any, *args: Any) -> list[Any]:
        self.start(count, work, *args)
        return [self.result(rank) for rank in range(count)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _serve(rank: int, local_device: int, device: str, pipe: Any, updating: Any) -> None:
    import torch.distributed as dist

    global _updating  # one per process; what is sent through the pipe cannot hold it
    _updating = updating
    logging.basicConfig(level=logging.WARNING)
    if device == "cuda":
        torch.cuda.set_device(local_device)
    while True:
        count, store, work, args = pipe.recv()
        try:
            if count > 1:
                wait = datetime.timedelta(seconds=300)
                dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count, timeout=wait)
            pipe.send(work(rank, device, *args))
        except Exception as error:  # noqa: BLE001 - the parent notes it
            pipe.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if device == "cuda":
                torch.cuda.empty_cache()


def sync(
    rank: int,
    device: str,
    config: Any,
    spec: ModelSpec,
    sizes: dict[str, int],
    addresses: list,
    rounds: int,
    rest: float = REST,
) -> Any:
    """One case on one rank: connect, prove, two updates with the full check, and ``rounds`` with the sampled one, which
    are measured, each after ``rest`` seconds. By the bucketed path, which has no check, one update to become warm and
    one that is measured. Every update brings other values than any other of the case, the last one always the same;
    ``digests`` are of what the engines that this rank leads then hold. What it leaves behind is NaN."""
    from vime.backends.megatron_utils.update_weight import weight_update_class
    from vime.backends.megatron_utils.update_weight.connected import leader
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate

    layout = ParallelLayout(**{"ep": 1, "etp": sizes.get("tp", 1), **sizes})
    params = make_parameters(spec, layout, device, rank)
    weights = KnownWeights(spec, layout, rank, params)
    starts: list[int] = []
    states: dict[int, list[list[dict[str, Any]]]] = {}  # engine -> after each measured update every worker's
    start, send, finish = EngineUpdate.start, EngineUpdate.send, EngineUpdate.finish
    measuring = False

    def counted(self: EngineUpdate, *args: Any) -> None:
        starts.append(self.address.index)
        start(self, *args)

    def announced(self: EngineUpdate, message: dict[str, Any]) -> None:
        if measuring:
            _updating.set()
        send(self, message)

    def timed(self: EngineUpdate, version: int) -> None:
        finish(self, version)
        states.setdefault(self.address.index, []).append(self.states)

    EngineUpdate.start, EngineUpdate.send, EngineUpdate.finish = counted, announced, timed  # type: ignore[method-assign]
    stats: dict[str, list[dict[str, float]]] = {}
    crossed: int | None = None
    try:
        planned = config.weight_sync.update_weight_transport != "bucketed"
        for check, count in (("full", 2), ("sampled", rounds)) if planned else (("off", 1),):
            config.weight_sync.check_weight_update = check
            make = weight_update_class(config.weight_sync.update_weight_transport)
            update = make(config, spec, layout, rank, params, device)
            update.connect_rollout_engines(addresses)
            last = 2 + count + (64 if check == "full" else 0)  # what is last is state 0
            if check != "sampled":
                weights.become(1 - last)
                update.update_weights(1)
            for engine in update._engines.values():
                engine.proven = True  # by the first update of all
            if planned:
                weights.become(2 - last)
                update.update_weights(2)
            starts.clear()
            states.clear()
            measuring = check != "full"
            before = over_nvlink() if rank == 0 else None
            stats[check] = []
            for version in range(3, 3 + count):
                weights.become(version - last)
                time.sleep(rest)
                stats[check].append(update.update_weights(version))
            after = over_nvlink() if rank == 0 else None
            crossed = after - before if before is not None and after is not None else None
        digests = {address.index: _digests(address, update) for address in addresses if leader(address) == rank}
        update.disconnect_rollout_engines()  # or this one's memory is still mapped when the next begins
    finally:
        EngineUpdate.start, EngineUpdate.send, EngineUpdate.finish = start, send, finish  # type: ignore[method-assign]
    return {"stats": stats, "starts": starts, "states": states, "crossed": crossed, "digests": digests}


def _digests(address: EngineAddress, update: Any) -> list[dict[str, str]]:
    """Of every parameter and buffer of each of an engine's workers."""
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
    from vime.backends.megatron_utils.update_weight.exchange import raise_first

    asking = EngineUpdate(address, update._connection, 60.0)
    asking.keep_digests()
    asking.poison()
    asking.close()
    raise_first([asking.failure])
    return [answer["digests"] for answer in asking._digests]


def over_nvlink() -> int | None:
    """Bytes that all GPUs have received over NVLink so far, by the counters of the links; None where there are none."""
    try:
        command = ["nvidia-smi", "nvlink", "--getthroughput", "d"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    received = [int(count) for count in re.findall(r"Rx:\s*(\d+)\s*KiB", said)]
    return 1024 * sum(received) if received else None


def link_bandwidth(rank: int, device: str) -> float | None:
    """Bytes per second when one GPU reads another's memory, by torch. Both must be visible."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return None
    here = torch.cuda.current_device()
    return _bandwidth(*(torch.empty(4 << 30, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (here, 1 - here)))


def local_bandwidth(rank: int, device: str) -> float:
    """Bytes per second of a copy within one device, one way."""
    size = 4 << 30 if device == "cuda" else 256 << 20
    return _bandwidth(*(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)))


def _bandwidth(target: torch.Tensor, source: torch.Tensor) -> float:
    gpus = {tensor.device for tensor in (target, source) if tensor.is_cuda}
    seconds = []
    for _ in range(4):
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        started = time.perf_counter()
        target.copy_(source)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        seconds.append(time.perf_counter() - started)
    return target.numel() / min(seconds)
