"""The rollout engines: started, watched, put to sleep, woken, and replaced when one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.command import engine_command
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.protocol import listens
from vime.cluster.calls import gather
from vime.cluster.device import Device
from vime.cluster.placement import Placement
from vime.cluster.trainer_group import join_driver
from vime.config import Config
from vime.errors import EngineError
from vime.models.spec import ModelSpec
from vime.types import EngineAddress

logger = logging.getLogger(__name__)

_HOST_SHARE = 0.2  # of its seat, in Ray's books; the trainer rank has the rest
_WATCH_SECONDS = 0.2
_STOP_SECONDS = 30.0
_DEATH_SECONDS = 5.0  # from the first failure to where the end of an engine is known; a second when nothing else runs
_CLOSING_SECONDS = 30.0  # for which a server may go on to live after it has closed its port


class EngineHost:
    """The Ray actor beside one engine: starts the vLLM server as its child, on the node where the engine's GPUs are."""

    def __init__(self, index: int, log: str, folder: str) -> None:
        self._unfit = join_driver(folder, log)
        self._index, self._log = index, log
        self._engine: EngineProcess | None = None

    def start(
        self, config: Config, spec: ModelSpec, device: Device, gpus: list[int], host: str
    ) -> tuple[str, int | None]:
        """Start the server and wait until it answers; returns its address and pid."""
        if self._unfit:
            raise self._unfit
        command = engine_command(config, spec, self._index, device=device, gpu_ids=gpus, host=host)
        engine = EngineProcess(command, self._log)
        engine.start()
        engine.wait_ready(config.rollout.engine_start_timeout)
        self._engine = engine
        return engine.url, engine.pid

    @ray.method(concurrency_group="watch")
    def until_end(self) -> str:
        """Returns when the server has died, with what is known of its end; fails when this process itself is killed."""
        while True:
            if self._engine is not None and not self._engine.alive():
                return f"its server has ended{self._engine.describe_end()}"
            time.sleep(_WATCH_SECONDS)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.terminate()


class EngineGroup:
    """All engines of a run."""

    def __init__(self, config: Config, spec: ModelSpec, placement: Placement, device: Device, logs: Path) -> None:
        self._config, self._spec, self._placement, self._device, self._logs = config, spec, placement, device, logs
        self._actor = ray.remote(concurrency_groups={"watch": 1})(EngineHost)  # type: ignore[call-overload]  # Ray's stub lacks it
        self._restarts_left = config.rollout.engine_restarts
        self._hosts: dict[int, Any] = {}
        self._ends: dict[int, ray.ObjectRef] = {}
        self._addresses: dict[int, EngineAddress] = {}
        self._start(range(placement.num_engines))

    @property
    def addresses(self) -> list[EngineAddress]:
        return [self._addresses[index] for index in sorted(self._addresses)]

    def _start(self, indices: Sequence[int]) -> None:
        calls = {}
        for index in indices:
            seats = self._placement.engine_seats(index)
            options = self._placement.actor_options(seats.start, _HOST_SHARE)
            host = self._actor.options(**options).remote(index, self._log(index), os.getcwd())
            self._hosts[index] = host
            self._ends[index] = host.until_end.remote()
            gpus = [self._placement.seats[seat].gpu for seat in seats]
            node = self._placement.seats[seats.start].node
            calls[f"engine {index}"] = host.start.remote(self._config, self._spec, self._device, gpus, node)
        timeout = self._config.rollout.engine_start_timeout + 30  # the host gives up first, and knows why
        started = gather(calls, "starting the engines", timeout, EngineError)
        for index, (url, pid) in zip(indices, started.values(), strict=True):
            seats = self._placement.engine_seats(index)
            node = self._placement.seats[seats.start].node
            slot, log = self._placement.slot(index), self._log(index)
            self._addresses[index] = EngineAddress(index, url, len(seats), slot, node, log)
            logger.info("engine %d (pid %d) serves at %s", index, pid, url)

    def _log(self, index: int) -> str:
        return str(self._logs / f"engine-{index}.log")

    def dead(self, suspects: Sequence[int] = ()) -> dict[int, str]:
        """Engines that do not live any more, or never serve again, each with the cause.

        Args:
            suspects: engines that have just failed. If one of them is dying, that shows only when all its processes
                have ended and the one beside it has looked, so it is waited for; longer if it has closed its port: a
                server that was told to end does so first, and then waits for its answers.
        """
        self._wait_for_ends(suspects, _DEATH_SECONDS)
        closing = [index for index in suspects if index in self._addresses and not self.listens(index)]
        self._wait_for_ends(closing, _CLOSING_SECONDS)
        dead = dict.fromkeys(closing, "nobody listens at its port, and its server has not ended")
        for index, end in self._ends.items():
            if ray.wait([end], timeout=0)[0]:
                try:
                    dead[index] = ray.get(end)
                except RayActorError:
                    dead[index] = "the process beside it, which watches it, was killed"
        return dead

    def _wait_for_ends(self, indices: Sequence[int], seconds: float) -> None:
        ends = [self._ends[index] for index in indices if index in self._ends]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=seconds)

    def listens(self, index: int) -> bool:
        """False if connections to engine ``index`` are refused: it has ended, or is about to."""
        return listens(self._addresses[index].url)

    def replace(self, index: int, cause: str) -> None:
        """Start engine ``index`` anew on the same GPUs. It must be connected and fully synced before it serves.

        Raises:
            EngineError: ``--engine-restarts`` engines have been replaced already.
        """
        if self._restarts_left <= 0:
            limit = self._config.rollout.engine_restarts
            raise EngineError(f"engine {index} died ({cause}) and --engine-restarts {limit} have been used up")
        self._restarts_left -= 1
        logger.warning("engine %d died: %s; starting it again (%d restarts left)", index, cause, self._restarts_left)
        self._end(index)
        self._start([index])

    def sleep(self) -> None:
        """Give the GPUs to the trainer: weights and KV cache are dropped (level 2), since a sync follows."""
        self._on_all(lambda client: client.sleep(level=2))

    def wake(self, tag: str) -> None:
        """Take memory again, for ``"weights"`` or the ``"kv_cache"``."""
        self._on_all(lambda client: client.wake_up(tags=[tag]))

    def _on_all(self, call: Callable[[EngineClient], object]) -> None:
        addresses = self.addresses

        def on_one(address: EngineAddress) -> None:
            with EngineClient(address.url, address.index) as client:
                call(client)

        with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as threads:
            list(threads.map(on_one, addresses))

    def _end(self, index: int) -> None:
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(self._hosts[index].stop.remote(), timeout=_STOP_SECONDS)
        ray.kill(self._hosts.pop(index))
        self._addresses.pop(index, None)

    def stop(self) -> None:
        """End all engines, together."""
        stopping = [host.stop.remote() for host in self._hosts.values()]
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS) if stopping else None
        for host in self._hosts.values():
            ray.kill(host)
        self._hosts.clear()
