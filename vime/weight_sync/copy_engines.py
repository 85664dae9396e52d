"""Reads other GPUs' memory with this GPU's copy engines, piece by piece.

On two H200s a kernel reads 375 GB/s while nobody reads this GPU, and 338 while the other one does; probably since its
many small requests take room on the links that carry answers the other way. A copy engine reads 397 and 374
(benchmarks/link_reads_h200x2.md), and leaves the multiprocessors to whoever else has work. But it moves whole pieces
only. Enqueued one by one, even from a CUDA graph, pieces of 1.5 MiB do not overlap, and come with 210 GB/s; so many go
into one call, which no graph can hold. What is small, strided or converted is the kernel's, and so is everything where
all of it together is little: it takes 0.1 ms until the first byte comes.

The driver does a call's copies in any order, and one call after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vime.weight_sync.arena_cuda import checked
from vime.weight_sync.copy_table import taking_turns

LEAST = 512 << 10  # bytes of a piece: the host needs half a microsecond for each, a link 1.3 for 512 KiB
WORTH = 448 << 20  # bytes in all: the higher rate makes up for 0.1 ms above 350 MB both ways, above 680 one way
# Pieces per call: the first ones are on the way while the host prepares the next, which are twice as many. A driver is
# said to have failed with fifty thousand in one call, and to have hung after many calls, between GPU and host
# (vllm-project/vllm#49276): hence --no-copy-engines.
_FEWEST, _MOST = 16, 1024
_BATCHED_COPIES = 12080  # the CUDA version of the first driver that has them


def available() -> bool:
    """Whether the driver, and what calls it, take many copies in one call."""
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]  # beside every CUDA torch

    (version,) = checked(driver.cuDriverGetVersion(), "asking for the driver's version")
    same_major = version // 1000 == driver.CUDA_VERSION // 1000  # the call has other arguments since 13
    return hasattr(driver, "cuMemcpyBatchAsync") and version >= _BATCHED_COPIES and same_major


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all programs: torch has few, and NCCL and vLLM take theirs from the same ones."""
    return torch.cuda.Stream(device)


class CopyEngines:
    """The pieces that one program leaves to the copy engines of ``device``.

    Args:
        sources, targets: int [pieces], addresses.
        sizes: int [pieces], bytes.
        origins: int [pieces], the trainer rank that each comes from.
        first: the rank to begin with, or the next one that is read from.
    """

    def __init__(
        self,
        device: torch.device,
        sources: np.ndarray,
        targets: np.ndarray,
        sizes: np.ndarray,
        origins: np.ndarray,
        first: int = 0,
    ) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        order = _in_order(sizes, (origins - first) % (int(origins.max()) + 1))
        places = [[driver.CUdeviceptr(at) for at in side[order].tolist()] for side in (targets, sources)]
        counts = sizes[order].tolist()
        self.bytes = sum(counts)
        self._calls: list[tuple[list[Any], list[Any], list[int]]] = []
        start, many = 0, _FEWEST
        while start < len(counts):
            part = slice(start, start + many)
            self._calls.append((places[0][part], places[1][part], counts[part]))
            start, many = start + many, min(2 * many, _MOST)
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        self._copy = driver.cuMemcpyBatchAsync
        self._stream = _stream(device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Enqueue the copies: after what is on the current stream, beside what is put there within the context, and
        before all that comes then. The first ones are under way while the host does what the context holds.

        Raises:
            ArenaError: the driver refuses them.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            self._enqueue(self._calls[:1])
            yield
            self._enqueue(self._calls[1:])
        finally:  # also after an error: memory that is given back then may be written to until here
            torch.cuda.current_stream().wait_stream(self._stream)

    def _enqueue(self, calls: Sequence[tuple[list[Any], list[Any], list[int]]]) -> None:
        for targets, sources, sizes in calls:
            rest = (len(sizes), [self._attributes], [0], 1, self._stream.cuda_stream)
            checked(self._copy(targets, sources, sizes, *rest), "copying from another GPU")


def _in_order(sizes: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """The largest first: they give the host time. Of equal ones, those of different ``turns`` alternate."""
    order = np.argsort(-sizes, kind="stable")
    equal = np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1)
    return np.concatenate([part[taking_turns(turns[part])] for part in equal])
