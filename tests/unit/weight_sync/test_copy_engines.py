"""What copy engines do of a program, and in which order; the driver's batched copy is stood in for by one that moves
bytes on the CPU when its stream is waited for, as late as a GPU may."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.weight_sync.test_copy_triton_host import Gpu, gpu  # noqa: F401 - a fixture
from tests.unit.weight_sync.test_links import SHAPES, Trainer
from tests.unit.weight_sync.toy import ToyModel
from vime.weight_sync import copy_engines, receiver, session
from vime.weight_sync.arena import node_name
from vime.weight_sync.copier import make_copier
from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.copy_engines import LEAST
from vime.weight_sync.load_plan import LoadFill
from vime.weight_sync.program import Copy, CopyProgram
from vime.weight_sync.receiver import Place

BF16 = torch.bfloat16
LARGE = LEAST // 2  # elements of a piece that a copy engine takes


class Driver:
    """``cuda.bindings.driver``, as far as it is used."""

    CUDA_VERSION: int = 13030

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
        assert (attributes.srcAccessOrder, attributes.flags, first, attribute_sets) == (1, 1, [0], 1)
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
def driver(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:  # noqa: F811
    made: Any = Driver()
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = made
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    current = Stream(made, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # real events want real streams
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made, len(made.waiting)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(gpu.module, "WORTH", LEAST)
    copy_engines._stream.cache_clear()
    yield made
    copy_engines._stream.cache_clear()


def copy(source: tuple[int, int], param: str, count: int, offset: int = 0) -> Copy:
    return Copy(source, offset, BF16, (1,), param, 0, (1,), (count,), param)


def program(gpu: Gpu) -> tuple[CopyProgram, dict[tuple[int, int], torch.Tensor], dict[str, torch.Tensor]]:  # noqa: F811
    """Rank 0 is here, rank 1 has memory here too (number 1), and on another GPU: pieces that are large, a little
    smaller, strided, converted in two ways, 8 and 2 bytes off what is aligned, left to torch, and after a fill."""
    arenas = {(0, 0): gpu.allocate(BF16, 8 * LARGE).normal_().view(torch.uint8)}
    arenas |= {(1, number): gpu.allocate(BF16, 8 * LARGE).normal_().view(torch.uint8) for number in range(2)}
    arenas[1, 0].view(torch.float16)[4 * LARGE : 5 * LARGE] = torch.randn(LARGE).half()
    arenas[1, 0].view(torch.int64)[LARGE * 3 // 2 :] = torch.arange(LARGE // 2)
    names = ("near", "near too", "far", "small", "strided", "filled", "half", "8 off", "2 off")
    params = {name: gpu.allocate(BF16, LARGE) for name in names}
    params |= {name: gpu.allocate(torch.float32, LARGE) for name in ("converted", "torch")}
    copies = [
        copy((0, 0), "near", LARGE),
        copy((1, 1), "near too", LARGE),
        copy((1, 0), "far", LARGE),
        copy((1, 0), "small", LARGE - 8, 2 * LARGE),
        Copy((1, 0), 0, BF16, (128, 1), "strided", 0, (64, 1), (LARGE // 64, 64), "strided"),
        copy((1, 0), "converted", LARGE, 4 * LARGE),
        copy((1, 0), "filled", LARGE, 6 * LARGE),
        Copy((1, 0), 8 * LARGE, torch.float16, (1,), "half", 0, (1,), (LARGE,), "half"),
        copy((1, 0), "8 off", LARGE, 8),
        copy((1, 0), "2 off", LARGE, 2),
        Copy((1, 0), 12 * LARGE, torch.int64, (1,), "torch", 0, (1,), (LARGE // 2,), "torch"),
    ]
    return CopyProgram(copies, [LoadFill("filled", (LARGE,), (1,), 0, 7.0)]), arenas, params


FAR = {(1, 0)}
BY_ENGINE = {"far", "filled", "8 off", "2 off"}


def expected(made: CopyProgram, arenas: Any, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    wanted = {name: torch.zeros_like(param) for name, param in params.items()}
    reference = CpuCopier(made)
    reference.bind(arenas, wanted)
    reference.run()
    return wanted


def bound(gpu: Any) -> tuple[Any, Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # noqa: F811
    """A copier of :func:`program`, its arenas and parameters, and what these should be after a run."""
    made, arenas, params = program(gpu)
    copier = gpu.copier(made, far=FAR)
    copier.bind(arenas, params)
    return copier, arenas, params, expected(made, arenas, params)


def without_engines(copier: Any, driver: Driver, params: dict[str, torch.Tensor], wanted: Any) -> set[str]:
    """The parameters that are right if the engines do nothing."""
    for param in params.values():
        param.zero_()
    driver.loses = True
    copier.run()
    driver.loses = False
    return {name for name, param in params.items() if torch.equal(param, wanted[name])}


def test_large_pieces_from_other_gpus_are_read_by_copy_engines_and_all_else_by_the_kernel(
    gpu: Any,  # noqa: F811
    driver: Driver,
) -> None:
    copier, _, params, wanted = bound(gpu)
    assert without_engines(copier, driver, params, wanted) == params.keys() - BY_ENGINE
    copier.run()
    assert driver.calls == 2 * [4 * [LEAST]]
    assert copier.engine_bytes == 4 * LEAST
    assert copier.check("full", 0)() == []
    for name, param in params.items():
        assert torch.equal(param, wanted[name]), name
    for number, name in ((2, "far"), (6, "filled"), (8, "8 off"), (0, "near")):  # whoever copied it, it is looked at
        params[name].view(torch.int16)[LARGE - 3] ^= 1
        assert copier.check("full", 0)() == [number]
        assert [number] in [copier.check("sampled", version)() for version in range(61)]
        params[name].view(torch.int16)[LARGE - 3] ^= 1


def test_where_large_pieces_are_little_together_the_kernel_is_sooner_done(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, arenas, params = program(gpu)
    wanted = expected(made, arenas, params)
    for worth, used in ((4 * LEAST, True), (4 * LEAST + 1, False)):
        monkeypatch.setattr(gpu.module, "WORTH", worth)
        copier = gpu.copier(made, far=FAR)
        copier.bind(arenas, params)
        driver.calls.clear()
        copier.run()
        assert bool(driver.calls) == used
        assert all(torch.equal(param, wanted[name]) for name, param in params.items())


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
    made.copies.pop()  # torch's own copies are not captured
    copier = gpu.copier(made, replay=True, far=FAR)
    copier.bind(arenas, params)
    for replayed in ([], ["replay"], ["replay"]):
        driver.happened.clear()
        copier.run()
        order = [what for what, _ in itertools.groupby(driver.happened)]
        both = ["engines", *replayed, "kernel", "engines"]
        assert order == ["start", "fill", "1 waits for 0", *both, "0 waits for 1", "stop"]


def test_the_largest_first_and_more_and_more_of_them_in_a_call(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host needs a while for each, and what is under way must last until the next call."""
    captures: list[Any] = []
    monkeypatch.setattr(copy_engines, "_MOST", 32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: types.SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(gpu.copier, "_capture", captures.append)
    count = 90
    source, target = gpu.allocate(torch.uint8, LEAST + 16 * count), gpu.allocate(BF16, LARGE + 8 * count)
    pieces = [copy((1, 0), f"p{n}", LARGE + 8 * (n * 7 % count)) for n in range(count)]
    copier = gpu.copier(CopyProgram(pieces, []), replay=True, far=FAR)
    copier.bind({(1, 0): source}, {f"p{n}": target for n in range(count)})
    copier.run()
    assert [len(sizes) for sizes in driver.calls] == [16, 32, 32, 10]
    all_sizes = [size for sizes in driver.calls for size in sizes]
    assert all_sizes == sorted((2 * each.numel for each in pieces), reverse=True)
    copier.run()
    assert not gpu.launches  # of nothing: an error on a GPU
    assert not captures  # likewise


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_that_are_read_from_take_turns(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
) -> None:
    """One after the other, or all workers in the same order, all would read from the same GPU at the same time."""
    order: list[int] = []
    call = driver.cuMemcpyBatchAsync
    monkeypatch.setattr(driver, "cuMemcpyBatchAsync", lambda to, at, *rest: (order.extend(at), call(to, at, *rest))[1])
    arenas = {(rank, 0): gpu.allocate(torch.uint8, 2 * LEAST) for rank in range(3)}
    target = gpu.allocate(BF16, 2 * LARGE)
    pieces = [copy((rank, 0), f"p{rank}{n}", LARGE * (1 + n % 2)) for rank in range(3) for n in range(4)]
    copier = gpu.copier(CopyProgram(pieces, []), far=set(arenas), first=first)
    copier.bind(arenas, {piece.param: target for piece in pieces})
    copier.run()
    assert driver.calls == [6 * [2 * LEAST] + 6 * [LEAST]]
    ranks = [next(rank for (rank, _), arena in arenas.items() if arena.data_ptr() == at) for at in order]
    assert ranks == 4 * [(first + turn) % 3 for turn in range(3)]


def test_where_memory_has_moved_it_is_read_there(gpu: Any, driver: Driver) -> None:  # noqa: F811
    copier, arenas, params, _ = bound(gpu)
    copier.run()
    moved = {source: gpu.allocate(torch.uint8, len(arena)).copy_(arena) for source, arena in arenas.items()}
    for source, arena in moved.items():
        arena.view(BF16)[: 4 * LARGE].neg_()
        arenas[source].fill_(0)
    copier.bind(moved, params)
    assert without_engines(copier, driver, params, expected(copier.program, moved, params)) == params.keys() - BY_ENGINE
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(params["far"], moved[1, 0].view(BF16)[:LARGE])
    copier.unbind()
    assert copier.engine_bytes == 4 * LEAST  # of the last run; load-format layers ask when all is unbound
    driver.calls.clear()
    copier.bind(moved, params)
    copier.run()
    assert driver.calls == [4 * [LEAST]]
    assert len(driver.waiting) == 2  # the current stream, and one more, however often it is bound


def test_what_copy_engines_do_is_found_out_anew_though_tiles_are_the_same(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier, arenas, params, wanted = bound(gpu)
    copier.unbind()
    monkeypatch.setattr(gpu.module, "WORTH", 5 * LEAST)
    copier.bind(arenas, params)
    assert without_engines(copier, driver, params, wanted) == params.keys()


@pytest.mark.parametrize(
    ("version", "bindings", "used"),
    [(12080, 12090, True), (12070, 12090, False), (12090, 13000, False), (13000, 13030, True), (13000, 12090, False)],
)
def test_a_driver_that_does_not_fit_leaves_all_of_it_to_the_kernel(
    gpu: Any,  # noqa: F811
    driver: Driver,
    version: int,
    bindings: int,
    used: bool,
) -> None:
    driver.version, driver.CUDA_VERSION = version, bindings
    copier, _, params, wanted = bound(gpu)
    copier.run()
    assert ("engines" in driver.happened) == used
    assert all(torch.equal(param, wanted[name]) for name, param in params.items())


@pytest.mark.parametrize("refused", ["first call", "second call"])
def test_what_the_driver_refuses_the_kernel_copies_and_all_else_from_then_on(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    monkeypatch.setattr(copy_engines, "_FEWEST", 1)
    kernel = gpu.copy_kernel

    def refuse(*args: Any) -> None:
        driver.answer = 1
        kernel(*args)

    driver.answer = int(refused == "first call")
    monkeypatch.setattr(gpu, "copy_kernel", refuse)
    copier, arenas, params, wanted = bound(gpu)
    copier.run()
    assert driver.happened[-1] == "0 waits for 1"
    assert all(torch.equal(param, wanted[name]) for name, param in params.items())
    assert copier.check("full", 0)() == []
    assert "copying from another GPU failed: CUDA_ERROR_INVALID_VALUE" in caplog.text
    driver.answer = 0
    moved = {source: gpu.allocate(torch.uint8, len(arena)).copy_(arena) for source, arena in arenas.items()}
    driver.calls.clear()
    for there in (arenas, moved):
        copier.bind(there, params)
        assert without_engines(copier, driver, params, wanted) == params.keys()
    assert (driver.calls, copier.engine_bytes) == ([], 0)
    assert len(caplog.records) == 1


def test_what_the_driver_refuses_later_is_not_replayed_without_it(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was captured beside copy engines is the kernel's part alone."""

    class Graph:
        def __init__(self, copier: Any) -> None:
            self.tiles = [launch.by_kernel for launch in copier._launches]
            self.copier = copier

        def replay(self) -> None:
            now, self.copier._launches = (
                self.copier._launches,
                [
                    dataclasses.replace(launch, by_kernel=tiles)
                    for launch, tiles in zip(self.copier._launches, self.tiles, strict=True)
                ],
            )
            self.copier._enqueue()
            self.copier._launches = now

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 0.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(gpu.copier, "_capture", lambda copier: Graph(copier))
    made, arenas, params = program(gpu)
    made.copies.pop()  # torch's own copies are not captured
    wanted = expected(made, arenas, params)
    copier = gpu.copier(made, replay=True, far=FAR)
    copier.bind(arenas, params)
    for answer in (0, 0, 0, 1, 1, 1):
        driver.answer = answer
        for param in params.values():
            param.zero_()
        copier.run()
        assert all(torch.equal(param, wanted[name]) for name, param in params.items())


def test_after_an_error_too_nothing_goes_on_behind_the_current_stream(
    gpu: Any,  # noqa: F811
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that is given back then would be written to when somebody else has it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    copier, *_ = bound(gpu)
    monkeypatch.setattr(gpu, "copy_kernel", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        copier.run()
    assert driver.happened[-2:] == ["engines", "0 waits for 1"]
    assert not any(driver.waiting.values())


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("mine", "far"), [("GPU-1", {0, 2}), ("GPU-9", {0, 1, 2}), (None, set())])
def test_a_worker_says_what_is_on_other_gpus(
    mine: str | None, far: set[int], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[bool, set[int], int]] = []

    def make(part: CopyProgram, device: torch.device, replay: bool, there: Any, first: int) -> CpuCopier:
        said.append((replay, {rank for rank, _ in there}, first))
        copier = CpuCopier(part)
        copier.engine_bytes = 5
        return copier

    monkeypatch.setattr(receiver, "make_copier", make)
    names = list(SHAPES)
    trainer = Trainer(names[:2], names[2:3], names[3:])
    worker = receiver.Receiver(ToyModel(SHAPES), Place(0, 0, 4, node_name(), gpu=mine), "full", copy_engines=wanted)
    worker.connect(trainer.shards)
    assert said[0] == (True, far if wanted else set(), 1)
    assert all(each == (False, said[0][1], 1) for each in said[1:])
    worker.update(1)
    assert worker.report.engine_bytes == 5 * len(said)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_trainer_says_whether_copy_engines_may_be_used(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []

    class Watched(receiver.Receiver):
        def __init__(self, *args: Any) -> None:
            said.append(args[5])
            super().__init__(*args)

    monkeypatch.setattr(session, "Receiver", Watched)
    shards = Trainer(list(SHAPES)).shards.to_json()
    worker = session.Session(ToyModel(SHAPES), 0, torch.device("cpu"))
    worker.connect(session.InitInfo("first", 0, [0], ["cpu-0"], "full", shards, copy_engines=wanted))
    assert said == [wanted]


def test_what_is_far_comes_to_the_gpus_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = types.ModuleType("vime.weight_sync.copy_triton")
    stand_in.TritonCopier = lambda *args: args
    monkeypatch.setitem(sys.modules, "vime.weight_sync.copy_triton", stand_in)
    empty = CopyProgram([], [])
    made: Any = make_copier(empty, torch.device("cuda"), True, FAR, 3)
    assert made == (empty, True, FAR, 3)
