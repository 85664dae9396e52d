"""The trainer's ranks as one object: every method is called on all of them and returns when all have finished."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from vime.cluster.calls import gather
from vime.cluster.device import Device
from vime.cluster.placement import Placement
from vime.config import Config
from vime.errors import TrainerError, VimeError
from vime.models.spec import ModelSpec
from vime.types import EngineAddress, TrainBatch

if TYPE_CHECKING:
    from vime.weight_sync.channel import Meeting

_START_SECONDS = 600.0
_REACH_SECONDS = 60.0  # a store that is open
_RANK_SHARE = 0.5  # of its seat, in Ray's books; the engine's actor has the rest
_WATCH_SECONDS = 0.5
_MOST_THREADS = 16  # of one rank on a CPU

T = TypeVar("T")


class TrainerRank:
    """One trainer process: a MegatronTrainer behind Ray."""

    def __init__(self, rank: int, log: str, folder: str) -> None:
        self._unfit = join_driver(folder, log)
        self._rank = rank
        self._trainer: Any = None
        self._meeting: Meeting | None = None

    def begin(self) -> int:
        """Called first; returns this process's pid."""
        if self._unfit:
            raise self._unfit
        return os.getpid()

    def invite(self, host: str) -> tuple[str, int]:
        """Open the store where the ranks meet, at ``host`` alone; returns its address. It lives as long as this rank,
        which asks it itself."""
        from vime.weight_sync.channel import Meeting

        self._meeting = Meeting(host, _REACH_SECONDS)
        return self._meeting.address

    def start(self, config: Config, spec: ModelSpec, world_size: int, place: tuple[str, int], device: Device) -> None:
        """Meet the other ranks at ``place`` and load the model."""
        # Imported here: the driver, which imports this module, has no use for torch and Megatron.
        from vime.backends.megatron_utils.trainer import MegatronTrainer
        from vime.weight_sync.channel import visit

        if device == "cpu":
            use_threads(config.cluster.actor_num_gpus_per_node)
        store = self._meeting.store if self._meeting else visit(*place, _REACH_SECONDS)
        self._trainer = MegatronTrainer(
            config, spec, rank=self._rank, world_size=world_size, store=store, device=device, local_rank=0
        )

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._trainer, method)(*args)

    @ray.method(concurrency_group="watch")
    def until_end(self) -> None:
        """Never returns: the reference to this call fails at the moment the process dies."""
        threading.Event().wait()


def use_threads(ranks: int) -> None:
    """Share this node's cores among its trainer ranks: Ray leaves a process one thread, and cores idle beside it."""
    import torch

    torch.set_num_threads(max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_THREADS)))


class TrainerGroup:
    """All ranks. A call that fails on one rank fails as a whole, with that rank's error."""

    def __init__(self, config: Config, spec: ModelSpec, placement: Placement, device: Device, logs: Path) -> None:
        self._config = config
        self.pids: list[int] = []
        world_size = config.cluster.world_size
        actor = ray.remote(concurrency_groups={"watch": 1})(TrainerRank)  # type: ignore[call-overload]  # Ray's stub lacks it
        self._ranks = [
            actor.options(**placement.actor_options(rank, _RANK_SHARE), name=f"trainer-{rank}").remote(
                rank, str(logs / f"trainer-{rank}.log"), os.getcwd()
            )
            for rank in range(world_size)
        ]
        self.pids = self._gather([rank.begin.remote() for rank in self._ranks], "starting the trainer", _START_SECONDS)
        self._ends = {rank.until_end.remote(): number for number, rank in enumerate(self._ranks)}
        invited = self._ranks[0].invite.remote(placement.seats[0].node)
        (place,) = self._gather([invited], "opening the trainer's store", _START_SECONDS)
        self._gather(
            [rank.start.remote(config, spec, world_size, place, device) for rank in self._ranks],
            "loading the model into the trainer",
            _START_SECONDS + config.train.train_timeout,
        )

    def _name(self, rank: int) -> str:
        return f"trainer rank {rank} (pid {self.pids[rank]})" if self.pids else f"trainer rank {rank}"

    def _gather(self, refs: list[ray.ObjectRef], what: str, timeout: float) -> list[Any]:
        calls = {self._name(rank): ref for rank, ref in enumerate(refs)}
        return list(gather(calls, what, timeout, TrainerError).values())

    def while_alive(self, what: str, seconds: float, work: Callable[..., T], *args: Any) -> T:
        """Result of ``work(*args)``, in which the trainer has no part (generation); ends at once when a rank dies.

        Raises:
            TrainerError: names the rank. ``work`` is left behind in its thread and ends with the engines it talks to.
            VimeError: not even the deadlines within ``work`` ended it in ``seconds``.
        """
        deadline = time.monotonic() + seconds
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(*args), None))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                outcome.append((None, error))

        context = contextvars.copy_context()  # the progress line nests by it
        thread = threading.Thread(target=context.run, args=(run,), name=what, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_WATCH_SECONDS)
            ended, _ = ray.wait(list(self._ends), timeout=0)
            if ended:
                raise TrainerError(f"{self._name(self._ends[ended[0]])} has died during: {what}")
            if time.monotonic() > deadline:
                raise VimeError(
                    f"{what} did not end within {seconds:g} s, nor by its own deadlines: an async function that blocks "
                    "(time.sleep, a library call without await) stops them; run such calls in asyncio.to_thread"
                )
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _all(self, what: str, timeout: float, method: str, *args: Any) -> list[Any]:
        return self._gather([rank.call.remote(method, *args) for rank in self._ranks], what, timeout)

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Learn from one rollout; returns its metrics."""
        shared = ray.put(batch)  # once per node, not once per rank
        return self._all(
            f"training on rollout {rollout_id}", self._config.train.train_timeout, "train", rollout_id, shared
        )[0]

    def connect(self, engines: list[EngineAddress]) -> None:
        """Agree with the engines on where every weight lies. Again after an engine was replaced."""
        # As in update_weights(); here these are connecting, and opening channels.
        seconds = 3 * self._config.weight_sync.weight_update_timeout
        self._all("connecting to the engines", seconds + 60, "connect_rollout_engines", engines)

    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        """Bring the weights into all engines, or into those of ``only``; returns what the sync measured."""
        # Each phase has its own deadline inside; this one is for a rank that no longer answers at all.
        seconds = 6 * self._config.weight_sync.weight_update_timeout
        return self._all("updating the engines' weights", seconds, "update_weights", version, only)[0]

    def save(self, directory: Path) -> None:
        self._all(f"saving to {directory}", self._config.train.train_timeout, "save", str(directory))

    def load(self, directory: Path) -> None:
        self._all(f"loading {directory}", self._config.train.train_timeout, "load", str(directory))

    def save_hf(self, directory: Path) -> None:
        self._all(f"exporting to {directory}", self._config.train.train_timeout, "save_hf", str(directory))

    def offload(self) -> None:
        self._all("moving the optimizer to host memory", self._config.train.train_timeout, "offload")

    def onload(self) -> None:
        self._all("moving the optimizer back", self._config.train.train_timeout, "onload")

    def stop(self) -> None:
        """End the processes. They hold nothing that is not on disk already, so they are not asked."""
        for rank in self._ranks:
            ray.kill(rank)


def join_driver(folder: str, log: str) -> VimeError | None:
    """What the process of an actor does first: it goes to the driver's folder, so that relative paths mean the same to
    both (those of a cluster that exists are in that of `ray start`), and writes into a file of the run.

    Returns what keeps it from that, for its first call to raise: of a constructor's error Ray tells that it died.
    """
    try:
        with contextlib.suppress(OSError):  # nor needs another node have it, where all paths are absolute
            os.chdir(folder)
        write_output_to(log)
    except OSError as error:
        return VimeError(
            f"cannot write {log} on node {socket.gethostname()}: {error.strerror}; --run-dir must lie where all nodes "
            "of the Ray cluster see it"
        )
    return None


def write_output_to(path: str) -> None:
    """Send this process's stdout and stderr, and those of libraries below Python, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
