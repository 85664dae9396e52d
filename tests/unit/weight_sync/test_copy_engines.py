"""What copy engines do of a program, and in which order; the driver's batched copy is stood in for by one that moves
bytes on the CPU when its stream is waited for, as late as a GPU may."""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.weight_sync.test_copy_triton_host import Gpu, gpu  # noqa: F401 - a fixture
from tests.unit.weight_sync.test_links import SHAPES, Trainer
from vime.weight_sync import copy_engines, receiver
from vime.weight_sync.arena import ArenaError
from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.copy_engines import LEAST
from vime.weight_sync.load_plan import LoadFill
from vime.weight_sync.program import Copy, CopyProgram

BF16 = torch.bfloat16
LARGE = LEAST // 2  # elements of a piece that a copy engine takes


class Driver:
    """``cuda.bindings.driver``, as far as it is used."""

    def __init__(self) -> None:
        self.version, self.answer, self.loses = 13000, 0, False
        self.calls: list[list[int]] = []  # sizes of each
        self.happened: list[str] = []
        self.waiting: dict[int, list[Callable[[], Any]]] = {}  # stream -> its copies

    CUdeviceptr = int
    CUmemcpyAttributes = types.SimpleNamespace
    CUmemcpySrcAccessOrder = types.SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    CUmemcpyFlags = types.SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return Code(0), self.version

    def cuMemcpyBatchAsync(
        self, targets: list[int], sources: list[int], sizes: list[int], count: int, *rest: Any
    ) -> tuple[Any]:
        (attributes,), first, attribute_sets, stream = rest
        assert (attributes.srcAccessOrder, first, attribute_sets) == (1, [0], 1)
        assert len(targets) == len(sources) == len(sizes) == count > 0
        if self.answer:
            return (Code(self.answer),)
        self.happened.append("engines")
        self.calls.append(sizes)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if not self.loses:
                self.waiting[stream].append(partial(ctypes.memmove, target, source, size))
        return (Code(0),)


class Code(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class Stream:
    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.cuda_stream = driver, number
        driver.waiting[number] = []

    def wait_stream(self, other: Stream) -> None:
        self.driver.happened.append(f"{self.cuda_stream} waits for {other.cuda_stream}")
        for copy in self.driver.waiting[other.cuda_stream]:
            copy()
        self.driver.waiting[other.cuda_stream].clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made: Any = Driver()
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = made
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    current = Stream(made, 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made, len(made.waiting)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    return made


def copy(source: tuple[int, int], param: str, count: int, offset: int = 0) -> Copy:
    return Copy(source, offset, BF16, (1,), param, 0, (1,), (count,), param)


def program(gpu: Gpu) -> tuple[CopyProgram, dict[tuple[int, int], torch.Tensor], dict[str, torch.Tensor]]:  # noqa: F811
    """Rank 0 is here, rank 1 on another GPU: pieces that are large, a little smaller, strided, converted, and one that
    a fill comes before."""
    arenas = {(rank, 0): gpu.allocate(BF16, 4 * LARGE).normal_().view(torch.uint8) for rank in range(2)}
    params = {name: gpu.allocate(BF16, LARGE) for name in ("near", "far", "small", "strided", "filled")}
    params["converted"] = gpu.allocate(torch.float32, LARGE)
    copies = [
        copy((0, 0), "near", LARGE),
        copy((1, 0), "far", LARGE),
        copy((1, 0), "small", LARGE - 8, 2 * LARGE),
        Copy((1, 0), 0, BF16, (128, 1), "strided", 0, (64, 1), (LARGE // 64, 64), "strided"),
        copy((1, 0), "converted", LARGE, 4 * LARGE),
        copy((1, 0), "filled", LARGE, 6 * LARGE),
    ]
    return CopyProgram(copies, [LoadFill("filled", (LARGE,), (1,), 0, 7.0)]), arenas, params


def expected(made: CopyProgram, arenas: Any, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    wanted = {name: torch.zeros_like(param) for name, param in params.items()}
    reference = CpuCopier(made)
    reference.bind(arenas, wanted)
    reference.run()
    return wanted


def test_large_pieces_from_other_gpus_are_read_by_copy_engines_and_all_else_by_the_kernel(
    gpu: Any,  # noqa: F811
    driver: Driver,
) -> None:
    made, arenas, params = program(gpu)
    wanted, by_kernel = expected(made, arenas, params), {"near", "small", "strided", "converted"}
    copier = gpu.copier(made, far={(1, 0)})
    copier.bind(arenas, params)
    driver.loses = True
    copier.run()
    assert {name for name, param in params.items() if torch.equal(param, wanted[name])} == by_kernel
    driver.loses = False
    copier.run()
    assert driver.calls == 2 * [[LEAST, LEAST]]
    assert copier.check("full", 0)() == []
    for name, param in params.items():
        assert torch.equal(param, wanted[name]), name
    for number, name in ((1, "far"), (5, "filled"), (0, "near")):  # whoever copied it, it is looked at
        params[name].view(torch.int16)[LARGE - 3] ^= 1
        assert copier.check("full", 0)() == [number]
        assert [number] in [copier.check("sampled", version)() for version in range(61)]
        params[name].view(torch.int16)[LARGE - 3] ^= 1


def test_in_which_order(gpu: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The clock starts, fills are made, then both copy, and the clock stops when both are done. The engines have their
    first pieces before the kernel is launched or replayed, and the kernel its part before the host sees to the rest."""
    names = iter(("start", "stop", "checked"))

    def event(**_: bool) -> Any:
        record = partial(driver.happened.append, next(names))
        return types.SimpleNamespace(record=record, elapsed_time=lambda other: 0.0)

    class Graph:
        def __init__(self, copier: Any) -> None:
            self.replay = lambda: (driver.happened.append("replay"), copier._enqueue())

    monkeypatch.setattr(copy_engines, "_FEWEST", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(gpu.copier, "_capture", lambda copier: Graph(copier))
    kernel, fill = gpu.copy_kernel, torch.Tensor.fill_
    monkeypatch.setattr(gpu, "copy_kernel", lambda *args: (driver.happened.append("kernel"), kernel(*args)))
    monkeypatch.setattr(torch.Tensor, "fill_", lambda *args: (driver.happened.append("fill"), fill(*args)))
    made, arenas, params = program(gpu)
    copier = gpu.copier(made, replay=True, far={(1, 0)})
    copier.bind(arenas, params)
    for replayed in ([], ["replay"], ["replay"]):
        driver.happened.clear()
        copier.run()
        order = [what for what, _ in itertools.groupby(driver.happened)]
        both = ["engines", *replayed, "kernel", "engines"]
        assert order == ["start", "fill", "1 waits for 0", *both, "0 waits for 1", "stop"]


def test_the_largest_first_and_more_and_more_of_them_in_a_call(gpu: Any, driver: Driver) -> None:  # noqa: F811
    """The host needs a while for each, and what is under way must last until the next call."""
    count = 60
    source, target = gpu.allocate(torch.uint8, LEAST + 16 * count), gpu.allocate(BF16, LARGE + 8 * count)
    pieces = [copy((1, 0), f"p{n}", LARGE + 8 * (n * 7 % count)) for n in range(count)]
    copier = gpu.copier(CopyProgram(pieces, []), far={(1, 0)})
    copier.bind({(1, 0): source}, {f"p{n}": target for n in range(count)})
    copier.run()
    assert [len(sizes) for sizes in driver.calls] == [16, 32, 12]
    all_sizes = [size for sizes in driver.calls for size in sizes]
    assert all_sizes == sorted((2 * each.numel for each in pieces), reverse=True)
    assert not gpu.launches  # of nothing: an error on a GPU


def test_ranks_that_are_read_from_take_turns(gpu: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """One after the other, all workers would read from the same GPU at the same time."""
    order: list[int] = []
    call = driver.cuMemcpyBatchAsync
    monkeypatch.setattr(driver, "cuMemcpyBatchAsync", lambda to, at, *rest: (order.extend(at), call(to, at, *rest))[1])
    arenas = {(rank, 0): gpu.allocate(torch.uint8, LEAST) for rank in range(3)}
    target = gpu.allocate(BF16, LARGE)
    pieces = [copy((rank, 0), f"p{rank}{n}", LARGE) for rank in range(3) for n in range(4)]
    copier = gpu.copier(CopyProgram(pieces, []), far=set(arenas))
    copier.bind(arenas, {piece.param: target for piece in pieces})
    copier.run()
    ranks = [next(rank for (rank, _), arena in arenas.items() if arena.data_ptr() == at) for at in order]
    assert sorted(ranks) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(set(ranks[at : at + 3]) == {0, 1, 2} for at in range(0, 12, 3))


def test_where_memory_has_moved_it_is_read_there(gpu: Any, driver: Driver) -> None:  # noqa: F811
    made, arenas, params = program(gpu)
    copier = gpu.copier(made, far={(1, 0)})
    copier.bind(arenas, params)
    copier.run()
    moved = {source: gpu.allocate(torch.uint8, len(arena)).copy_(arena) for source, arena in arenas.items()}
    for source, arena in moved.items():
        arena.view(BF16).neg_()
        arenas[source].fill_(0)
    copier.bind(moved, params)
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(params["far"], moved[1, 0].view(BF16)[:LARGE])
    copier.unbind()
    driver.calls.clear()
    copier.bind(moved, params)
    copier.run()
    assert driver.calls == [[LEAST, LEAST]]


def test_a_driver_that_is_too_old_leaves_all_of_it_to_the_kernel(gpu: Any, driver: Driver) -> None:  # noqa: F811
    driver.version = 12070
    made, arenas, params = program(gpu)
    wanted = expected(made, arenas, params)
    copier = gpu.copier(made, far={(1, 0)})
    copier.bind(arenas, params)
    copier.run()
    assert not driver.happened
    assert all(torch.equal(param, wanted[name]) for name, param in params.items())


@pytest.mark.parametrize("fails", ["first call", "second call", "kernel"])
def test_after_an_error_too_nothing_goes_on_behind_the_current_stream(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """Memory that is given back then would be written to when somebody else has it."""
    monkeypatch.setattr(copy_engines, "_FEWEST", 1)
    made, arenas, params = program(gpu)
    copier = gpu.copier(made, far={(1, 0)})
    copier.bind(arenas, params)

    def fail(*_: Any) -> None:
        driver.answer = 1
        if fails == "kernel":
            raise ArenaError("copying from another GPU failed: CUDA_ERROR_INVALID_VALUE")

    if fails == "first call":
        fail()
    else:
        monkeypatch.setattr(gpu, "copy_kernel", fail)
    with pytest.raises(ArenaError, match="copying from another GPU failed: CUDA_ERROR_INVALID_VALUE"):
        copier.run()
    assert driver.happened[-1] == "0 waits for 1"
    assert not any(driver.waiting.values())


@pytest.mark.parametrize(("mine", "far"), [("GPU-1", {0, 2}), ("GPU-9", {0, 1, 2}), (None, set())])
def test_a_worker_says_what_is_on_other_gpus(mine: str | None, far: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[set[int]] = []

    def make(part: CopyProgram, device: torch.device, replay: bool = False, there: Any = ()) -> CpuCopier:
        said.append({rank for rank, _ in there})
        return CpuCopier(part)

    monkeypatch.setattr(receiver, "make_copier", make)
    names = list(SHAPES)
    Trainer(names[:2], names[2:3], names[3:]).worker(mine)
    assert said
    assert all(each == far for each in said)
