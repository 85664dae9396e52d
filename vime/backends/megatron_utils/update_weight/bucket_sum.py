"""How ranks put a bucket together: the sum of what each of them contributes, over NCCL where each has its own GPU.

Gloo takes a GPU's memory through the host, at about 1 GB/s: a minute for 60 GB. NCCL does it at the speed of the links,
but whoever waits in it for a rank that has died waits without end. So the ranks meet over Gloo before every sum, which
names whoever is dead or late; and nothing of NCCL's is waited for but by looking whether it is done, whether every rank
of this node lives, and at the clock. (A rank of another node that dies in the millisecond of a sum may make NCCL's
watchdog end this process: that was never tried.)

That meeting is not one at which ranks say that they have sent: none stands in the loop over buckets (S6). It asks who
is about to add up, and nobody waits in it who would not wait in the sum itself, which needs all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence

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
        # A rank without parameters has no arena, and so no GPU that the others know of: then there are too few.
        gpus = {arena["device"] for rank in ranks for arena in rank.arenas[:1] if arena["kind"] == KIND}
        self._with_nccl = len(ranks) > 1 and len(gpus) == len(ranks)
        self._group: dist.ProcessGroup | None = None
        self._failure: str | None = None  # of forming it

    def add(self, tensor: torch.Tensor) -> None:
        """Make an int32 tensor the sum of all ranks' tensors.

        Raises:
            WeightSyncError: a rank did not come. After that the ranks cannot meet any more.
        """
        if not self._with_nccl:
            self._everybody.sum_in_place(tensor, "update")
            return
        self._everybody.gather(None, "update")
        try:
            if self._group is None:
                forming = threading.Thread(target=self._form, args=(tensor.device,), daemon=True)
                forming.start()
                self._wait(lambda: not forming.is_alive())
            dist.all_reduce(tensor, group=self._group)
            done = torch.cuda.Event()
            done.record()
            self._wait(done.query)
        except (RuntimeError, WeightSyncError) as error:
            self.close()
            if not isinstance(error, WeightSyncError):
                error = WeightSyncError("update", "the trainer", f"its ranks cannot add up a bucket: {error}")
            self._everybody.give_up(f"{error.where}: {error.cause}")
            raise error from None

    def _form(self, device: torch.device) -> None:
        """In a thread, since it waits for the others; with a first sum, at which NCCL connects them."""
        try:
            torch.cuda.set_device(device)
            # Longer than ours: at its own deadline NCCL's watchdog ends the process.
            wait = datetime.timedelta(seconds=10 * self._everybody.timeout)
            group = dist.new_group(self._everybody.ranks, timeout=wait, backend="nccl")
            assert isinstance(group, dist.ProcessGroup)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            torch.cuda.current_stream().synchronize()
            self._group = group
        except Exception as error:  # noqa: BLE001 - whatever it is, add() raises it; in this thread nobody would see it
            self._failure = f"{type(error).__name__}: {error}"

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self._everybody.timeout
        look_at = time.monotonic() + _ALIVE
        while not done():
            now = time.monotonic()
            if now > end:
                cause = f"a bucket was not added up within {self._everybody.timeout:g} s"
                raise WeightSyncError("update", "the trainer", cause)
            if now > look_at:
                look_at = now + _ALIVE
                if dead := self._everybody.dead():
                    raise WeightSyncError("update", dead, "died while a bucket was added up")
            time.sleep(_LOOK)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def close(self) -> None:
        """Give up the communicator, and its memory: some 200 MB of the GPU. Not collective: what another rank never
        comes to is dropped as well."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already
                group.abort()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
