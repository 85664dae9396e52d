"""How ranks put a bucket together: the sum of what each of them contributes, over NCCL where each has its own GPU.

Gloo takes a GPU's memory through the host, at about 1 GB/s: a minute for 60 GB. NCCL does it at the speed of the links,
but knows no deadline that a process survives. So the ranks meet over Gloo before every sum (whoever is dead or late is
named there), and what was enqueued is waited for on the host; after the deadline the communicator is given up.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.update_weight.exchange import Exchange
from vime.errors import WeightSyncError
from vime.weight_sync.arena_cuda import KIND
from vime.weight_sync.shard_map import RankInfo

_LOOK = 1e-4  # seconds between looks at whether a sum is done
_ALIVE = 0.5  # seconds between looks at whether all ranks live


class BucketSum:
    """Collective, over all ranks. Nothing is formed before the first sum.

    Args:
        everybody: the exchange of all ranks.
        ranks: all of them.
    """

    def __init__(self, everybody: Exchange, ranks: Sequence[RankInfo]) -> None:
        self._everybody = everybody
        gpus = {arena["device"] for rank in ranks for arena in rank.arenas[:1] if arena["kind"] == KIND}
        self._with_nccl = len(ranks) > 1 and len(gpus) == len(ranks)
        self._group: dist.ProcessGroup | None = None

    def add(self, tensor: torch.Tensor) -> None:
        """Make an int32 tensor the sum of all ranks' tensors.

        Raises:
            WeightSyncError: a rank did not come. After that the ranks cannot add anything any more.
        """
        if not self._with_nccl:
            self._everybody.sum_in_place(tensor, "update")
            return
        self._everybody.gather(None, "update")
        try:
            if self._group is None:
                self._group = self._form()
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            self.close()
            raise WeightSyncError("update", "the trainer", f"its ranks cannot add up a bucket: {error}") from error
        self._wait()

    def _form(self) -> dist.ProcessGroup:
        # Longer than ours: at its own deadline NCCL's watchdog ends the process.
        wait = datetime.timedelta(seconds=10 * self._everybody.timeout)
        group = dist.new_group(self._everybody.ranks, timeout=wait, backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _wait(self) -> None:
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + self._everybody.timeout
        look_at = time.monotonic() + _ALIVE
        while not done.query():
            dead = ""
            if time.monotonic() > look_at:
                dead, look_at = self._everybody.dead(), time.monotonic() + _ALIVE
            if dead or time.monotonic() > end:
                self.close()
                cause = f"a bucket was not added up within {self._everybody.timeout:g} s"
                raise WeightSyncError(
                    "update", dead or "the trainer", "left its ranks adding up a bucket" if dead else cause
                )
            time.sleep(_LOOK)

    def close(self) -> None:
        """Give up the communicator and its memory. Not collective: also what another rank never comes to is dropped."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already
                group.abort()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
