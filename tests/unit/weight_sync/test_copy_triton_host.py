"""What TritonCopier does on the host: tables, launches, what is captured, which tiles a check looks at.

Both kernels are stood in for by torch's indexing, after the same description of the tables; the kernels themselves are
tested in test_copy_triton.py, where Triton is.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.load_plan import LoadFill
from vime.weight_sync.program import Copy, CopyProgram

DTYPES = {name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")}


class Gpu:
    """One block of memory in which all arenas and parameters lie, and the kernels that read and write it."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size + 512, dtype=torch.uint8)
        self.memory = self.memory[-self.memory.data_ptr() % 512 :][:size]
        self.taken = 0
        self.launches: list[tuple[str, torch.Tensor]] = []  # kernel, the tiles it was run for

    def allocate(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self.taken
        self.taken += -(-size // 512) * 512
        assert self.taken <= self.memory.numel()
        part = torch.frombuffer(self.memory.numpy(), dtype=torch.uint8, count=size, offset=start)
        return part.view(dtype).view(shape)  # with a storage of its own, as everything that an allocator gives

    def places(self, runs: torch.Tensor, tile: torch.Tensor, side: int, dtype: torch.dtype, vector: int, size: int):
        """Indices into the memory, seen as ``dtype``, of a tile's elements: side 0 the source, 1 the target."""
        run = runs[int(tile[0])].tolist()
        units = torch.arange(int(tile[1]), min(int(tile[1]) + size, run[2]))
        rows, columns = units // run[3], units % run[3]
        assert (run[side] - self.memory.data_ptr()) % (dtype.itemsize * vector) == 0  # or the GPU would fault
        first = (run[side] - self.memory.data_ptr()) // dtype.itemsize
        return (first + (rows * run[4 + side] + columns) * vector)[:, None] + torch.arange(vector)

    def copy_kernel(self, grid: int, runs: Any, tiles: Any, read: Any, write: Any, vector: int, size: int) -> None:
        self.launches.append(("copy", tiles[:grid]))
        for tile in tiles[:grid]:
            source = self.memory.view(read.torch)[self.places(runs, tile, 0, read.torch, vector, size)]
            at = self.places(runs, tile, 1, write.torch, vector, size)
            self.memory.view(write.torch)[at] = source.to(write.torch)

    def check_kernel(self, grid: int, runs: Any, tiles: Any, differs: Any, first: int, step: int, *types: Any) -> None:
        read, write, bits, vector, size, _ = types
        mine = tiles[first::step]
        assert len(mine) == grid
        self.launches.append(("check", mine))
        for tile in mine:
            source = self.memory.view(read.torch)[self.places(runs, tile, 0, read.torch, vector, size)]
            target = self.memory.view(write.torch)[self.places(runs, tile, 1, write.torch, vector, size)]
            if not torch.equal(source.to(write.torch).view(bits.torch), target.view(bits.torch)):
                differs[int(runs[int(tile[0]), 6])] = 1


class Kernel:
    def __init__(self, function: Any, do_not_specialize: Sequence[str] = ()) -> None:
        self.name, self.gpu, self.not_specialized = function.__name__, None, list(do_not_specialize)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, num_warps: getattr(self.gpu, self.name)(*grid, *args)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    language: Any = types.ModuleType("triton.language")
    for name, dtype in DTYPES.items():
        setattr(language, name, types.SimpleNamespace(torch=dtype, primitive_bitwidth=8 * dtype.itemsize))
    triton: Any = types.ModuleType("triton")
    triton.jit = lambda function=None, **how: Kernel(function, **how) if function else partial(Kernel, **how)
    triton.language = language
    with monkeypatch.context() as meanwhile:  # torch remembers, once and for all, whether there is a Triton
        meanwhile.setitem(sys.modules, "triton", triton)
        meanwhile.setitem(sys.modules, "triton.language", language)
        meanwhile.delitem(sys.modules, "vime.weight_sync.copy_triton", raising=False)
        module: Any = importlib.import_module("vime.weight_sync.copy_triton")
        del sys.modules["vime.weight_sync.copy_triton"]  # nobody else is to find it
    device: Any = Gpu(64 << 20)
    module.copy_kernel.gpu = module.check_kernel.gpu = device
    device.copier = module.TritonCopier
    device.module = module
    return device


def weights(gpu: Gpu) -> tuple[CopyProgram, dict[tuple[int, int], torch.Tensor], dict[str, torch.Tensor]]:
    """Copies: contiguous, strided, converted, and one of a kind that is left to torch; and a fill."""
    generator = torch.Generator().manual_seed(0)

    def numbers(dtype: torch.dtype, count: int) -> torch.Tensor:
        tensor = gpu.allocate(dtype, count)
        return tensor.copy_(torch.randint(-99, 99, (count,), generator=generator)).view(torch.uint8)

    arenas = {(0, 0): numbers(torch.bfloat16, 5 << 18), (1, 0): numbers(torch.float32, 1 << 14)}
    arenas[1, 1] = numbers(torch.int64, 100)
    params = {
        "a": gpu.allocate(torch.bfloat16, 5 << 18),
        "b": gpu.allocate(torch.bfloat16, 256, 96),
        "c": gpu.allocate(torch.bfloat16, 1 << 14),
        "d": gpu.allocate(torch.float32, 100),
    }
    program = CopyProgram(
        [
            Copy((0, 0), 0, torch.bfloat16, (1,), "a", 0, (1,), (5 << 18,), "A"),
            Copy((0, 0), 64, torch.bfloat16, (192, 1), "b", 0, (96, 1), (256, 64), "B"),
            Copy((1, 0), 0, torch.float32, (1,), "c", 0, (1,), (1 << 14,), "C"),
            Copy((1, 1), 0, torch.int64, (1,), "d", 0, (1,), (100,), "D"),
        ],
        [LoadFill("b", (256, 32), (96, 1), 64, 7.0)],
    )
    return program, arenas, params


def test_copies_what_the_cpu_copies(gpu: Gpu) -> None:
    program, arenas, params = weights(gpu)
    expected = {name: torch.zeros_like(param) for name, param in params.items()}
    reference = CpuCopier(program)
    reference.bind(arenas, expected)
    reference.run()
    copier = gpu.copier(program)  # pyright: ignore[reportAttributeAccessIssue]
    copier.bind(arenas, params)
    copier.run()
    for name, param in params.items():
        assert torch.equal(param, expected[name]), name
    assert [kernel for kernel, _ in gpu.launches] == ["copy", "copy"]  # one per kind of unit: 16 bytes, fp32 to bf16
    assert copier.check("full", 1)() == []


def test_a_flipped_bit_is_found_whatever_moved_the_copy(gpu: Gpu) -> None:
    program, arenas, params = weights(gpu)
    copier = gpu.copier(program)  # pyright: ignore[reportAttributeAccessIssue]
    copier.bind(arenas, params)
    copier.run()
    for number, (name, place) in enumerate({"a": 900000, "b": 96 * 200 + 63, "c": 9999, "d": 99}.items()):
        bits = params[name].view(torch.int32 if name == "d" else torch.int16).view(-1)
        bits[place] ^= 1 << 3
        assert copier.check("full", 0)() == [number]
        assert copier.check("off", 0)() == []
        assert [number] in [copier.check("sampled", version)() for version in range(61)]
        bits[place] ^= 1 << 3
    assert copier.check("full", 0)() == []


def test_the_sampled_check_has_seen_every_tile_once_after_61_versions(gpu: Gpu) -> None:
    program, arenas, params = weights(gpu)
    copier = gpu.copier(program)  # pyright: ignore[reportAttributeAccessIssue]
    copier.bind(arenas, params)
    copier.run()
    copied = [tuple(tile) for _, tiles in gpu.launches for tile in tiles.tolist()]
    assert len(copied) > 61
    gpu.launches.clear()
    for version in range(1000, 1061):
        assert copier.check("sampled", version)() == []
    checked = [tuple(tile) for _, tiles in gpu.launches for tile in tiles.tolist()]
    assert sorted(checked) == sorted(copied)
    assert all(len(tiles) > 0 for _, tiles in gpu.launches)  # an empty launch is an error on a GPU


@pytest.mark.parametrize("plain", [False, True])
def test_no_parameter_is_kept_alive_and_the_check_still_answers(gpu: Any, plain: bool) -> None:
    program, arenas, params = weights(gpu)
    if plain:  # nothing but addresses is kept: the same ones need no new table
        program = CopyProgram(program.copies[:3], [])
    copier = gpu.copier(program)
    copier.bind(arenas, params)
    copier.run()
    params["b"].view(torch.int16).view(-1)[96 * 200 + 63] ^= 1 << 3
    answer = copier.check("full", 0)
    copier.forget_params()
    assert copier._fills == copier._others == []
    assert answer() == [1]
    table = copier._launches[0].runs
    copier.bind(arenas, params)
    assert (copier._launches[0].runs is table) == plain
    copier.run()
    assert copier.check("full", 0)() == []


def test_no_version_needs_a_variant_of_the_check_of_its_own(gpu: Any) -> None:
    assert set(gpu.module.check_kernel.not_specialized) == {"first", "step"}


def test_the_host_looks_through_many_copies_without_torchs_threads(gpu: Gpu) -> None:
    """Torch wakes a thread per core for so many elements; where a container may use fewer, that is slow."""
    source, target = gpu.allocate(torch.bfloat16, 40_000), gpu.allocate(torch.bfloat16, 40_000)
    copies = [Copy((0, 0), 2 * n, torch.bfloat16, (), "a", n, (), (), f"{n}") for n in range(40_000)]
    copier = gpu.copier(CopyProgram(copies, []))  # pyright: ignore[reportAttributeAccessIssue]
    copier.bind({(0, 0): source.view(torch.uint8)}, {"a": target})
    copier.check("off", 0)()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert copier.check("off", 0)() == []
    ran = {event.name for event in profile.events() or ()}
    assert ran
    assert not ran & {"aten::zero_", "aten::fill_", "aten::copy_", "aten::any", "aten::ne", "aten::nonzero"}, ran


def test_bound_again_only_what_moved_is_made_anew(gpu: Gpu) -> None:
    program, arenas, params = weights(gpu)
    copier = gpu.copier(program)  # pyright: ignore[reportAttributeAccessIssue]
    copier.bind(arenas, params)
    copier.run()
    before = list(copier._launches)
    copier.bind(arenas, params)
    assert copier._launches == before
    moved = {source: gpu.allocate(torch.uint8, arena.numel()) for source, arena in arenas.items()}
    for source, arena in moved.items():
        arena.copy_(arenas[source])
        arenas[source].fill_(0)
    moved[0, 0].view(torch.bfloat16).neg_()
    old = params["a"].clone()
    copier.bind(moved, params)
    assert [launch.tiles is one.tiles for launch, one in zip(copier._launches, before, strict=True)] == [True, True]
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(params["a"], -old)
    copier.unbind()
    assert not copier._others
    assert not copier._fills
    copier.bind(moved, params)
    copier.run()
    assert copier.check("full", 0)() == []


class Graph:
    """Stands in for a CUDA graph of what a copier enqueues."""

    def __init__(self, copier: Any) -> None:
        self.enqueue, self.replays = copier._enqueue, 0

    def replay(self) -> None:
        self.replays += 1
        self.enqueue()


@pytest.fixture
def graphs(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """A machine with a GPU, whose captured graphs these are."""
    made: list[Graph] = []

    def capture(copier: Any) -> Graph:
        made.append(Graph(copier))
        return made[-1]

    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 0.0)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(gpu.copier, "_capture", capture)
    return made


def without_others(program: CopyProgram) -> CopyProgram:
    return CopyProgram([copy for copy in program.copies if copy.tensor != "D"], program.fills)


def test_the_second_run_captures_and_later_ones_replay_until_memory_moves(gpu: Any, graphs: list[Graph]) -> None:
    program, arenas, params = weights(gpu)
    copier = gpu.copier(without_others(program), replay=True)
    copier.bind(arenas, params)
    replays = []
    for _ in range(4):
        copier.run()
        copier.bind(arenas, params)  # nothing has moved
        replays.append([graph.replays for graph in graphs])
    assert replays == [[], [1], [2], [3]]
    moved = {source: gpu.allocate(torch.uint8, arena.numel()).copy_(arena) for source, arena in arenas.items()}
    params["a"].zero_()
    copier.bind(moved, params)
    copier.run()
    assert [graph.replays for graph in graphs] == [3]  # what it copies from is not there any more
    assert torch.equal(params["a"], moved[0, 0].view(torch.bfloat16)[: 5 << 18])
    copier.run()
    assert [graph.replays for graph in graphs] == [3, 1]
    copier.unbind()
    copier.bind(moved, params)
    copier.run()
    assert len(graphs) == 2


def test_the_clock_is_part_of_what_is_captured(gpu: Any, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a replay, the events would time the launch of the graph as well, a part of a small model's copy."""
    names = iter(("before", "after", "checked"))

    def happens(what: str) -> None:
        gpu.launches.append((what, torch.empty(0)))

    def event(enable_timing: bool, external: bool) -> Any:
        assert enable_timing
        assert external  # or it belongs to the capture, and cannot be read
        return types.SimpleNamespace(record=partial(happens, next(names)), elapsed_time=lambda other: 0.0)

    def replay(graph: Graph) -> None:
        happens("launch")
        graph.enqueue()
        happens("launched")

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(Graph, "replay", replay)
    program, arenas, params = weights(gpu)
    copier = gpu.copier(without_others(program), replay=True)
    copier.bind(arenas, params)
    for expected in (["before", "copy", "after"], *2 * [["launch", "before", "copy", "after", "launched"]]):
        gpu.launches.clear()
        copier.run()
        assert copier.check("full", 0)() == []
        order = [what for what, _ in gpu.launches]
        assert list(dict.fromkeys(order)) == [*expected, "check", "checked"]


@pytest.mark.parametrize("kind", ["not asked for", "copies by torch", "nothing to copy"])
def test_what_is_not_captured(gpu: Any, graphs: list[Graph], kind: str) -> None:
    program, arenas, params = weights(gpu)
    if kind == "not asked for":
        program = without_others(program)
    elif kind == "nothing to copy":
        program = CopyProgram([], [])
    copier = gpu.copier(program, replay=kind != "not asked for")
    copier.bind(arenas, params)
    for _ in range(3):
        copier.run()
    assert not graphs


def test_copies_go_on_where_a_capture_fails(
    gpu: Any, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: types.SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: types.SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    program, arenas, params = weights(gpu)
    copier = gpu.copier(without_others(program), replay=True)
    copier.bind(arenas, params)
    for _ in range(3):
        params["a"].zero_()
        copier.run()
        assert params["a"].any()
    assert caplog.text.count("cannot be captured") == 1
