"""Reads other GPUs' memory with this GPU's copy engines, piece by piece.

A kernel asks for 128 bytes at a time, and its requests take room on the links that carry answers the other way: on two
H200s it reads 375 GB/s while nobody reads this GPU, and 338 while the other one does. A copy engine reads 397 and 374
(benchmarks/link_reads_h200x2.md), and leaves the multiprocessors to whoever else has work. But it moves whole pieces
only, and one call for each takes so long that pieces of 1.5 MiB come with 210 GB/s. So many go into one call, which no
CUDA graph can hold; what is small, strided or converted is the kernel's.

The driver does a call's copies in any order, and one call after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vime.weight_sync.arena_cuda import checked

LEAST = 512 << 10  # bytes of a piece: the host needs half a microsecond for each, a link 1.3 for so many
# Pieces per call: the first ones are on the way while the host prepares the next, which are twice as many.
_FEWEST, _MOST = 16, 1024
_BATCHED_COPIES = 12080  # the CUDA version of the first driver that has them


def available() -> bool:
    """Whether the driver takes many copies in one call."""
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]  # beside every CUDA torch

    (version,) = checked(driver.cuDriverGetVersion(), "asking for the driver's version")
    return version >= _BATCHED_COPIES


class CopyEngines:
    """The pieces that one program leaves to copy engines; all go to a stream of their own.

    Args:
        sources, targets: int [pieces], first bytes.
        sizes: int [pieces], bytes.
    """

    def __init__(self, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        largest_first = np.argsort(-sizes, kind="stable")  # they give the host time
        places = [[driver.CUdeviceptr(at) for at in side[largest_first].tolist()] for side in (targets, sources)]
        counts = sizes[largest_first].tolist()
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
        self._stream = torch.cuda.Stream()

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
