"""A trainer rank's end of the channels: what it sends to workers that cannot read its memory.

A channel belongs to one engine. Its members are the ranks that the engine's plan names, the slot leader where buckets
must be sent as well, and the engine's workers. It is formed when the engine is connected, and anew after an update
that failed, since then nobody knows what is still on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
from vime.backends.megatron_utils.update_weight.exchange import error_value, raise_first
from vime.types import EngineAddress
from vime.weight_sync.channel import Channel, Meeting, address_towards
from vime.weight_sync.program import Source
from vime.weight_sync.remote import Sender


@dataclass(frozen=True)
class Members:
    """Who meets in an engine's channel. Trainer ranks come first, ascending; the workers follow."""

    ranks: list[int]
    workers: int

    def number(self, rank: int) -> int:
        return self.ranks.index(rank)

    def worker(self, number: int) -> int:
        return len(self.ranks) + number

    @property
    def total(self) -> int:
        return len(self.ranks) + self.workers


@dataclass
class _End:
    channel: Channel
    members: Members
    senders: list[tuple[int, Sender]]  # worker, and the stream to it


class Channels:
    """This rank's ends, by engine.

    Args:
        rank: global trainer rank.
        device: of its parameters.
        check: --check-weight-update.
        timeout: seconds that opening one, or sending one message, may take.
    """

    def __init__(self, rank: int, device: torch.device, check: str, timeout: float) -> None:
        self._rank, self._device, self._check, self._timeout = rank, device, check, timeout
        self._ends: dict[int, _End] = {}
        self._meetings: dict[int, Meeting] = {}  # a store must outlive the groups that were formed by it

    def invite(self, led: Sequence[EngineAddress]) -> dict[str, tuple[str, int]]:
        """Open a meeting for each engine that this rank leads: engine, as text -> host and port."""
        for address in led:
            self._meetings[address.index] = Meeting(address_towards(address.node), self._timeout)
        return {str(address.index): self._meetings[address.index].address for address in led}

    def form(
        self,
        invitations: Sequence[Mapping[str, tuple[str, int]]],
        wanted: Mapping[int, tuple[Members, list[list[int]]]],
        led: Sequence[EngineUpdate],
    ) -> None:
        """Meet in the channels of these engines; all ranks call this at once.

        Args:
            invitations: of all ranks.
            wanted: engine -> its channel's members, and of each worker the ranks that are to send to it.
            led: the engines that this rank leads, whose workers it calls.

        Raises:
            WeightSyncError: a worker did not come. RuntimeError: a rank did not.
        """
        places = {int(engine): place for part in invitations for engine, place in part.items()}

        def call_workers(update: EngineUpdate) -> None:
            members, of_workers = wanted[update.address.index]
            host, port = places[update.address.index]
            numbers = {str(rank): members.number(rank) for rank in members.ranks}
            info = {"host": host, "port": port, "members": numbers, "workers": members.workers}
            update.open_channel(info | {"planned": any(of_workers), "timeout": self._timeout})
            update.close()
            raise_first([update.failure])

        with ThreadPoolExecutor(max(len(led), 1)) as threads:
            calls = [threads.submit(call_workers, update) for update in led]
            try:
                for engine, (members, of_workers) in sorted(wanted.items()):  # the same order on every rank
                    if self._rank in members.ranks:
                        self._open(engine, *places[engine], members, of_workers)
            finally:  # a worker's own words say more than that it did not come
                for call in calls:
                    call.result()

    def _open(self, engine: int, host: str, port: int, members: Members, wanted: Sequence[Sequence[int]]) -> None:
        """Meet the others, and hear from each worker that wants something what it wants."""
        self.close(engine)
        number = members.number(self._rank)
        channel = Channel(host, port, number, members.total, self._device, self._timeout)
        senders = [
            (worker, Sender(channel, members.worker(worker), self._rank, self._check))
            for worker, ranks in enumerate(wanted)
            if self._rank in ranks
        ]
        self._ends[engine] = _End(channel, members, senders)

    @contextmanager
    def serving(
        self, engines: Sequence[int], version: int, arenas: Mapping[Source, torch.Tensor], failures: list[dict]
    ) -> Iterator[None]:
        """Within: the workers of these engines are sent what they want from this rank. Failures are added to the list
        at the end."""
        jobs = [
            (engine, f"engine {engine}, worker {worker}", lambda sender=sender: sender.serve(version, arenas))
            for engine in engines
            if engine in self._ends
            for worker, sender in self._ends[engine].senders
        ]
        with self._sending(jobs, failures):
            yield

    @contextmanager
    def sending(self, engine: int, payload: torch.Tensor, failures: list[dict]) -> Iterator[dict[str, int]]:
        """Within: every worker of an engine is sent the payload. Yields what a worker must know to receive it."""
        end = self._ends[engine]
        jobs = [
            (
                engine,
                f"engine {engine}, worker {worker}",
                lambda worker=worker: end.channel.send(payload, end.members.worker(worker)),
            )
            for worker in range(end.members.workers)
        ]
        with self._sending(jobs, failures):
            yield {"origin": end.members.number(self._rank), "bytes": payload.nbytes}

    @contextmanager
    def _sending(self, jobs: Sequence[tuple[int, str, Callable[[], None]]], failures: list[dict]) -> Iterator[None]:
        """A thread per worker: a worker that is slow, or waits for another rank, holds up nobody else."""
        if not jobs:
            yield
            return
        with ThreadPoolExecutor(len(jobs), "send weights") as threads:
            futures = [(engine, worker, threads.submit(self._on_device, job)) for engine, worker, job in jobs]
            try:
                yield
            finally:
                failures += [f for engine, worker, future in futures if (f := self._failure(engine, worker, future))]

    def _on_device(self, job: Callable[[], None]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        job()

    def _failure(self, engine: int, worker: str, future: Future[None]) -> dict[str, Any] | None:
        error = future.exception()
        if error is None:
            return None
        self.close(engine)  # whoever waits for this rank shall hear of it at once
        value = error_value(error, "update", f"trainer rank {self._rank}")
        return value | {"cause": f"sending to {worker}: {value['cause']}", "engines": [engine]}

    def close(self, engine: int) -> None:
        """Leave an engine's channel, if this rank is in one."""
        end = self._ends.pop(engine, None)
        if end is not None:
            end.channel.close()
