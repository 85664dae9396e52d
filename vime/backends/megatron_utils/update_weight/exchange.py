"""Where trainer ranks meet during a weight update: all-gathers of small JSON values, with a deadline.

A rank that has failed says so at the next meeting instead of staying away, so every other rank learns the cause. A rank
that stays away all the same is dead or late; the others then say which one, from the version pages that all ranks of a
node share.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.errors import VimeError, WeightSyncError
from vime.weight_sync.arena import Stamp, open_arena
from vime.weight_sync.shard_map import RankInfo

_GRACE = 20.0  # seconds that a meeting waits beyond a phase's deadline: whoever ran into that one comes to say so
_DYING = 2.0  # seconds for which a killed process may still be there after its connections have gone


class Exchange:
    """All-gather among ``ranks`` over a Gloo group of exactly these; one rank alone needs no group.

    Every rank of the default process group must construct it, at the same point, also those that are not in ``ranks``.

    Args:
        ranks: global ranks, ascending.
        timeout: seconds that one meeting may take.
        stamp: this rank's version page, for the exchange among all ranks: it counts the meetings there.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, stamp: Stamp | None = None) -> None:
        self.ranks, self.timeout = list(ranks), timeout
        self.group: dist.ProcessGroup | None = None
        self._stamp = stamp
        self._pages: dict[int, tuple[int, torch.Tensor]] = {}
        self._broken: str | None = None
        if len(self.ranks) > 1:
            wait = datetime.timedelta(seconds=timeout + _GRACE)
            group = dist.new_group(self.ranks, timeout=wait, backend="gloo")
            self.group = group if isinstance(group, dist.ProcessGroup) else None  # of ranks that are not in it

    def watch(self, ranks: Mapping[int, RankInfo], node: str) -> None:
        """Know the other ranks on this node, so as to name one that does not come."""
        mine = [info for info in ranks.values() if info.rank in self.ranks and info.node == node]
        self._pages = {info.rank: (info.stamp["pid"], open_arena(info.stamp)) for info in mine}

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank. Returns when all have come.

        Raises:
            WeightSyncError: a rank died or did not come in time. After that the ranks cannot meet any more.
        """
        if self.group is None:
            return [json.loads(json.dumps(value))]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._collective(phase, lambda: dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.group))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in self.ranks]
        self._collective(phase, lambda: dist.all_gather(parts, padded, group=self.group))
        return [json.loads(bytes(part[: int(n)].numpy())) for part, n in zip(parts, sizes, strict=True)]

    def sum_in_place(self, tensor: torch.Tensor, phase: str) -> None:
        """Add up an integer tensor over the ranks."""
        if self.group is not None:
            self._collective(phase, lambda: dist.all_reduce(tensor, group=self.group))

    def _collective(self, phase: str, run: Any) -> None:
        if self._broken is not None:
            raise WeightSyncError(phase, "the trainer", f"its ranks lost each other earlier: {self._broken}")
        if self._stamp is not None:
            self._stamp.count_meeting()
        try:
            run()
        except RuntimeError as error:
            where = self._absent() or "a trainer rank"
            self._broken = f"{where}: {error}"
            raise WeightSyncError(phase, where, f"did not come to the ranks' meeting ({error})") from error

    def give_up(self, cause: str) -> None:
        """Meet no more: the ranks have lost each other elsewhere, and not all of them know it."""
        self._broken = cause

    def dead(self) -> str:
        """The ranks of this node that have died, in words."""
        return ", ".join(
            f"trainer rank {rank} (pid {pid}, dead)" for rank, (pid, _) in self._pages.items() if not _runs(pid)
        )

    def _absent(self) -> str:
        """The ranks of this node that have died, or else those that are behind."""
        end = time.monotonic() + _DYING
        while not (dead := self.dead()) and time.monotonic() < end:
            time.sleep(0.02)
        if dead or self._stamp is None:
            return dead
        mine = Stamp.meetings(self._stamp.arena.tensor)
        late = [(rank, pid) for rank, (pid, page) in self._pages.items() if Stamp.meetings(page) < mine]
        return ", ".join(f"trainer rank {rank} (pid {pid}, late)" for rank, pid in late)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # dead, and its parent has not looked yet


def error_value(error: BaseException, phase: str, where: str) -> dict[str, Any]:
    """A failure as JSON, to bring to a meeting."""
    if isinstance(error, WeightSyncError):
        return {"phase": error.phase, "where": error.where, "cause": error.cause, "engines": list(error.engines)}
    cause = str(error) if isinstance(error, VimeError) else f"{type(error).__name__}: {error}"
    return {"phase": phase, "where": where, "cause": cause, "engines": []}


def raise_first(errors: Sequence[dict[str, Any] | None]) -> None:
    """Raise what the ranks brought, if they brought anything: the same error on every rank.

    Raises:
        WeightSyncError: the first failure in full, the others by place.
    """
    found = [error for error in errors if error]
    if not found:
        return
    first, others = found[0], [error["where"] for error in found[1:]]
    cause = first["cause"] + (f" (also failed: {', '.join(others)})" if others else "")
    engines = sorted({index for error in found for index in error["engines"]})
    raise WeightSyncError(first["phase"], first["where"], cause, tuple(engines))
