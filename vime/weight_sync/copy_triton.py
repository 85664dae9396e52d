"""Runs a copy program on a GPU: one launch per batch of the copy table, which for weights means one launch. Beside it,
copy engines read what lies in large pieces on other GPUs (copy_engines.py).

Both kernels are bound by memory. A program moves one tile: it reads which run and where, then 16 bytes per access and
several accesses in flight per thread. Rows are told apart by one 32-bit division per 16 bytes, and not at all in
contiguous runs. Needs Triton, which every CUDA build of torch brings.

Launching from Python takes an idle GPU 0.13 ms to see, a fifth of what a 0.6B model takes to copy. So what is run again
as it was can be replayed from a CUDA graph.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# What this reaches into has no usable types, where it is installed at all (it comes with a CUDA build of torch).
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from vime.weight_sync.arena import ArenaError
from vime.weight_sync.copy_cpu import source_view, target_view
from vime.weight_sync.copy_engines import LEAST, WORTH, CopyEngines, available
from vime.weight_sync.copy_table import TILE, Batch, Kind, bind, find_runs
from vime.weight_sync.program import CopyProgram, Source

log = logging.getLogger(__name__)

_WARPS = 4
# The sampled check looks at one tile in this many, others at every version. A prime, since origins take turns.
_PARTS = 61
_CHECK_STEP = 1024  # units that the check holds in registers at once, of source and of target


@triton.jit
def _places(run, unit, VECTOR: tl.constexpr):
    """Element offsets [units, VECTOR] of a run's units, at the source and at the destination."""
    total = tl.load(run + 2)
    per_row = tl.load(run + 3)
    if per_row == total:
        at = unit.to(tl.int64)
        to = at
    else:
        width = per_row.to(tl.int32)
        row = unit // width
        column = (unit - row * width).to(tl.int64)
        at = row.to(tl.int64) * tl.load(run + 4) + column
        to = row.to(tl.int64) * tl.load(run + 5) + column
    lane = tl.arange(0, VECTOR)[None, :]
    return (at * VECTOR)[:, None] + lane, (to * VECTOR)[:, None] + lane, (unit < total)[:, None]


@triton.jit
def _pointer(address, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE), bitcast=True)
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def copy_kernel(runs, tiles, READ: tl.constexpr, WRITE: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    run = runs + tl.load(tiles + 2 * tile).to(tl.int64) * 7
    unit = tl.load(tiles + 2 * tile + 1) + tl.arange(0, TILE)
    at, to, inside = _places(run, unit, VECTOR)
    values = tl.load(_pointer(tl.load(run), READ, VECTOR) + at, mask=inside)
    tl.store(_pointer(tl.load(run + 1), WRITE, VECTOR) + to, values.to(WRITE), mask=inside)


# Not specialized: another variant for 0, 1 and multiples of 16 would be compiled in the middle of some later update.
@triton.jit(do_not_specialize=["first", "step"])
def check_kernel(
    runs,
    tiles,
    differs,
    first,
    step,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    BITS: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compare tiles first, first + step, ... of target and source bit by bit; differs[copy] = 1 where they differ."""
    tile = first + tl.program_id(0).to(tl.int64) * step
    run = runs + tl.load(tiles + 2 * tile).to(tl.int64) * 7
    source = _pointer(tl.load(run), READ, VECTOR)
    target = _pointer(tl.load(run + 1), WRITE, VECTOR)
    start = tl.load(tiles + 2 * tile + 1)
    wrong = 0
    for done in range(0, TILE, STEP):
        unit = start + done + tl.arange(0, STEP)
        at, to, inside = _places(run, unit, VECTOR)
        read = tl.load(source + at, mask=inside, other=0).to(WRITE).to(BITS, bitcast=True)
        written = tl.load(target + to, mask=inside, other=0).to(BITS, bitcast=True)
        wrong |= tl.max(tl.max((read != written).to(tl.int32), axis=1), axis=0)
    if wrong != 0:
        tl.store(differs + tl.load(run + 6), 1)


@dataclass(frozen=True)
class Launch:
    """A batch, its table on the GPU, which runs copy engines do (bool [runs]), and the tiles of the others."""

    batch: Batch
    runs: torch.Tensor
    tiles: torch.Tensor
    by_engine: np.ndarray
    by_kernel: torch.Tensor


class TritonCopier:
    """A copy program on one GPU. All work is in order with the current stream's; :meth:`check`'s answer waits for it.

    Args:
        program: what to copy.
        replay: capture a CUDA graph at the second run with the same addresses, which takes some milliseconds once.
        far: arenas on other GPUs, which copy engines may read.
        first: the rank that they begin with.
    """

    def __init__(
        self, program: CopyProgram, replay: bool = False, far: Collection[Source] = (), first: int = 0
    ) -> None:
        self.program, self._replays = program, replay and torch.cuda.is_available()
        self._runs = find_runs(program)
        far = set(far) if far and available() else set()
        self._far = np.array([copy.source in far for copy in program.copies], dtype=bool)
        self._first = first
        self._origins = np.array([copy.source[0] for copy in program.copies], dtype=np.int64)  # trainer rank of each
        self._bound_to: tuple[int, ...] | None = None
        self._launches: list[Launch] = []
        self._engines: CopyEngines | None = None
        self._others: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._fills: list[tuple[torch.Tensor, float]] = []
        # In host memory that the GPU can write to: nearly always nothing is written, and nothing need be fetched. The
        # host looks at it with NumPy: for more than 32,768 elements (30B-A3B from TP2 to one GPU: 38,000 copies) torch
        # wakes a thread per core. Where a container may use fewer cores than there are that is slow: 64 threads on two
        # cores took 0.6 ms to clear it, and NumPy 3 us.
        self._differs: torch.Tensor | None = None
        self.seconds = self.check_seconds = 0.0
        self.engine_bytes = 0
        self._clock: tuple[Any, Any, Any] | None = None  # events before the last run, after it, after its check
        self._ran = False  # since it was bound
        self._graph: torch.cuda.CUDAGraph | None = None  # of what _enqueue() does

    def bind(self, arenas: Mapping[Source, torch.Tensor], params: Mapping[str, torch.Tensor]) -> None:
        copies, fills = self.program.copies, self.program.fills
        sources = [arenas[source].data_ptr() for source in self._runs.sources]
        targets = [params[name] for name in self._runs.params]
        targets_at = [target.data_ptr() for target in targets]
        addresses = (*sources, *targets_at, *(params[fill.param].data_ptr() for fill in fills))
        if addresses == self._bound_to:
            return
        self._fills = [
            (params[f.param].as_strided(f.shape, f.strides, params[f.param].storage_offset() + f.offset), f.value)
            for f in fills
        ]
        batches, others = bind(self._runs, sources, targets_at, [target.dtype for target in targets])
        self._others = [(n, source_view(copies[n], arenas), target_view(copies[n], params)) for n in others]
        before, self._launches = self._launches, []
        by_engines = self._by_engines(batches)
        for number, (batch, by_engine) in enumerate(zip(batches, by_engines, strict=True)):
            runs = torch.from_numpy(batch.runs).to(targets[0].device)
            last = before[number] if number < len(before) else None
            if last and batch.tiled_like(last.batch) and np.array_equal(by_engine, last.by_engine):
                self._launches.append(replace(last, batch=batch, runs=runs))  # tiles are most of the table
                continue
            made = batch.tiles(origins=self._origins[batch.runs[:, 6]])
            tiles = torch.from_numpy(made).to(runs.device)
            by_kernel = torch.from_numpy(made[~by_engine[made[:, 0]]]).to(runs.device) if by_engine.any() else tiles
            self._launches.append(Launch(batch, runs, tiles, by_engine, by_kernel))
        self._engines = self._make_engines(targets[0].device) if any(mine.any() for mine in by_engines) else None
        if self._differs is None:
            pinned = bool(targets) and targets[0].is_cuda
            self._differs = torch.zeros(len(copies), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._bound_to, self._ran, self._graph = addresses, False, None

    def _by_engines(self, batches: list[Batch]) -> list[np.ndarray]:
        """Of each batch's runs, which copy engines read: all large pieces, or none where they are little together."""
        found = [self._far[batch.runs[:, 6]] & batch.pieces(LEAST) for batch in batches]
        total = sum(int(batch.sizes()[mine].sum()) for batch, mine in zip(batches, found, strict=True))
        return found if total >= WORTH else [np.zeros_like(mine) for mine in found]

    def _make_engines(self, device: torch.device) -> CopyEngines:
        runs = np.concatenate([launch.batch.runs[launch.by_engine] for launch in self._launches])
        sizes = np.concatenate([launch.batch.sizes()[launch.by_engine] for launch in self._launches])
        return CopyEngines(device, runs[:, 0], runs[:, 1], sizes, self._origins[runs[:, 6]], self._first)

    def unbind(self) -> None:
        self._bound_to, self._others, self._fills = None, [], []
        self._engines = None
        self._ran, self._graph = False, None

    def forget_params(self) -> None:
        if self._others or self._fills:
            self.unbind()  # else nothing but addresses is kept, and they often come again

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue all fills and copies."""
        if self._clock is None and torch.cuda.is_available():  # external: captured, they are recorded at every replay
            before, after, checked = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(3))
            self._clock = before, after, checked
        # The first run compiles and loads the kernels, which cannot be captured. Torch's own copies may need memory.
        launches = any(len(launch.by_kernel) for launch in self._launches)
        if self._replays and self._ran and self._graph is None and launches and not self._others:
            self._graph = self._capture()
        enqueue = self._enqueue if self._graph is None else self._graph.replay
        if self._engines is None:
            enqueue()
        else:  # what they do cannot be captured: only the kernel's part is
            self._begin()
            try:
                with self._engines.copying():
                    enqueue()
            except ArenaError as error:
                log.warning("copy engines are not used any more, the kernel copies everything: %s", error)
                self._leave_engines()
                self._enqueue()
            else:
                self._end()
        self.engine_bytes = self._engines.bytes if self._engines is not None else 0
        self._ran = True

    def _leave_engines(self) -> None:
        self._far[:] = False
        self._engines = self._graph = None
        self._launches = [
            replace(launch, by_engine=np.zeros_like(launch.by_engine), by_kernel=launch.tiles)
            for launch in self._launches
        ]

    def _begin(self) -> None:
        if self._clock is not None:
            self._clock[0].record()
        for view, value in self._fills:
            view.fill_(value)

    def _end(self) -> None:
        if self._clock is not None:
            self._clock[1].record()

    def _enqueue(self) -> None:
        """All that copy engines do not do; without them, fills and the clock's marks too."""
        if self._engines is None:
            self._begin()
        for launch in self._launches:
            if len(launch.by_kernel):
                read, write, vector = _triton_types(launch.batch.kind)
                grid = (len(launch.by_kernel),)
                copy_kernel[grid](launch.runs, launch.by_kernel, read, write, vector, TILE, num_warps=_WARPS)
        for _, source, target in self._others:
            target.copy_(source)
        if self._engines is None:
            self._end()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Record what :meth:`_enqueue` does, without doing it; None where that is not possible."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:  # other threads may use the GPU meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._enqueue()
        except RuntimeError as error:
            log.warning("copies are launched one by one, since they cannot be captured in a CUDA graph: %s", error)
            self._replays = False
            return None
        return graph

    @torch.no_grad()
    def check(self, mode: str, version: int) -> Callable[[], list[int]]:
        """Enqueue the comparison of what was written with what is at the source, bit by bit.

        Args:
            mode: "full", "sampled" (one tile in 61, all of them within 61 versions) or "off".
            version: which tiles "sampled" looks at.

        Returns:
            A function that waits for the GPU and returns the numbers of the copies that differ. One check at a time.
        """
        differs = self._differs
        assert differs is not None, "not bound"
        on_host = differs.numpy()
        on_host.fill(0)
        step = _PARTS if mode == "sampled" else 1
        first = version % step
        for launch in self._launches if mode != "off" else ():
            count = len(range(first, len(launch.tiles), step))
            if count:
                read, write, vector = _triton_types(launch.batch.kind)
                types = (read, write, _BITS[write.primitive_bitwidth // 8], vector)
                tiles = (launch.runs, launch.tiles, differs, first, step)
                check_kernel[(count,)](*tiles, *types, TILE, _CHECK_STEP, num_warps=_WARPS)
        unequal = []
        for number, source, target in self._others if mode != "off" else ():
            bits = _INTEGERS[target.itemsize]
            unequal.append((number, (source.to(target.dtype).view(bits) != target.view(bits)).any()))
        if self._clock is not None:
            self._clock[2].record()

        def answer() -> list[int]:
            if self._clock is not None:
                torch.cuda.current_stream().synchronize()
                self.seconds = self._clock[0].elapsed_time(self._clock[1]) / 1e3
                self.check_seconds = self._clock[1].elapsed_time(self._clock[2]) / 1e3
            found = np.flatnonzero(on_host).tolist()
            return sorted(found + [number for number, wrong in unequal if wrong])

        return answer


_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _triton_types(kind: Kind) -> tuple[Any, Any, int]:
    return getattr(tl, kind.read), getattr(tl, kind.write), kind.vector
