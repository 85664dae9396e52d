"""Plan against brute force: random trainers, random engines; every element must arrive as the loaders would put it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime.errors import WeightSyncError
from vime.weight_sync.boxes import Box, Region, contiguous_strides, volume, whole
from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.load_plan import LoadCopy, LoadPlan, trace
from vime.weight_sync.program import compose
from vime.weight_sync.shard_map import RankInfo, ShardMap, TensorInfo

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass
class Trainer:
    """Tensors, and a shard map of pieces of them in two arenas per rank."""

    tensors: dict[str, torch.Tensor]
    shards: ShardMap
    arenas: dict[tuple[int, int], torch.Tensor]


def make_map(
    tensors: dict[str, torch.Tensor], rows: list[tuple[str, int, int, int, Region]], nodes: dict[int, str]
) -> ShardMap:
    """rows: tensor, rank, arena, byte offset, region."""
    infos = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    dims = max(t.dim() for t in tensors.values())
    numbers = {name: number for number, name in enumerate(tensors)}
    entries = []
    for name, rank, arena, offset, region in rows:
        pad = dims - len(region.box)
        starts, stops = [a for a, _ in region.box] + [0] * pad, [b for _, b in region.box] + [1] * pad
        at = offset + region.offset * tensors[name].element_size()
        entries.append([numbers[name], rank, arena, at, *starts, *stops, *region.strides, *[0] * pad])
    ranks = {rank: RankInfo(rank, node, f"cpu-{rank}", {}, [{}, {}]) for rank, node in nodes.items()}
    return ShardMap(infos, ranks, np.array(entries, dtype=np.int64))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut along each dimension at random places."""
    boxes: list[Box] = [()]
    for size in shape:
        inner = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        spans = list(zip([0, *inner], [*inner, size], strict=True))
        boxes = [(*box, span) for box in boxes for span in spans]
    return boxes


@st.composite
def trainers(draw: st.DrawFn) -> Trainer:
    ranks = draw(st.integers(1, 4))
    tensors, rows = {}, []
    ends = Counter()
    for number in range(draw(st.integers(1, 4))):
        name = f"t{number}"
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        tensors[name] = torch.randn(shape).to(dtype)
        for box in draw(cuts(shape)):
            holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            for rank in holders:  # each with padding of its own, dimensions in an order of its own
                arena = draw(st.integers(0, 1))
                grown = [b - a + draw(st.integers(0, 2)) for a, b in box]
                order = draw(st.permutations(range(len(grown))))
                inner = contiguous_strides([grown[k] for k in order])
                strides = tuple(inner[list(order).index(k)] for k in range(len(grown)))
                start = -(-ends[rank, arena] // 8) * 8 + draw(st.integers(0, 3)) * dtype.itemsize
                rows.append((name, rank, arena, start, Region(box, 0, strides)))
                ends[rank, arena] = start + torch.Size(grown).numel() * dtype.itemsize
    arenas = {key: torch.full((end + 16,), 0xEE, dtype=torch.uint8) for key, end in ends.items()}
    for name, rank, arena, start, region in rows:
        tensor = tensors[name]
        memory = arenas[rank, arena][start : start + (arenas[rank, arena].numel() - start) // 8 * 8].clone()
        typed = memory.view(tensor.dtype)
        typed.as_strided([b - a for a, b in region.box], region.strides).copy_(
            tensor[tuple(slice(*span) for span in region.box)]
        )
        arenas[rank, arena][start : start + memory.numel()] = memory
    nodes = dict.fromkeys(range(ranks), "here")
    return Trainer(tensors, make_map(tensors, rows, nodes), arenas)


def loader_step(draw: Any, name: str, tensor: torch.Tensor) -> tuple[str, list[tuple[int, int, int]], bool, int]:
    narrow = []
    for dim, size in enumerate(tensor.shape):
        if draw(st.booleans()):
            start = draw(st.integers(0, size - 1))
            narrow.append((dim, start, draw(st.integers(1, size - start))))
    return name, narrow, draw(st.booleans()), draw(st.integers(0, 2))


CHECKS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@given(trainers(), st.data())
@settings(max_examples=150, **CHECKS)
def test_every_element_arrives_as_the_loaders_put_it(trainer: Trainer, data: st.DataObject) -> None:
    every_element_arrives(trainer, data)


@pytest.mark.slow
@given(trainers(), st.data())
@settings(max_examples=5000, **CHECKS)
def test_every_element_arrives_in_thousands_of_cases(trainer: Trainer, data: st.DataObject) -> None:
    every_element_arrives(trainer, data)


def every_element_arrives(trainer: Trainer, data: st.DataObject) -> None:
    """A random loader: slices of tensors, transposed or not, one after the other in a parameter with zeroed padding."""
    steps = [loader_step(data.draw, *data.draw(st.sampled_from(sorted(trainer.tensors.items())))) for _ in range(3)]
    dtype = data.draw(st.sampled_from(DTYPES))

    def view(source: torch.Tensor, narrow: list[tuple[int, int, int]], transposed: bool) -> torch.Tensor:
        for dim, start, length in narrow:
            source = source.narrow(dim, start, length)
        return source.permute(tuple(range(source.dim())[::-1])) if transposed else source

    shapes = [view(trainer.tensors[name], narrow, flip).shape for name, narrow, flip, _ in steps]
    params = {
        f"p{number}": torch.full((*shape[:-1], shape[-1] + step[3]) if shape else (), float("nan"), dtype=dtype)
        for number, (shape, step) in enumerate(zip(shapes, steps, strict=True))
    }

    def load(into: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        for number, (name, narrow, flip, pad) in enumerate(steps):
            param, source = into[f"p{number}"], view(tensors[name], narrow, flip)
            if pad and source.dim():
                param[..., source.shape[-1] :].fill_(0)
                param = param[..., : source.shape[-1]]
            param.copy_(source)

    plan = trace(params, trainer.shards.tensors, lambda weights: load(params, dict(weights)))
    assert not plan.problems
    assert not plan.unwritten
    truth = {name: t.clone() for name, t in params.items()}
    load(truth, trainer.tensors)
    program = compose(plan, trainer.shards, data.draw(st.integers(0, 3)), "here")
    # Each element that the plan writes is written once: by as many copies' elements as there are.
    assert sum(c.numel for c in program.copies) == sum(volume(c.region.box) for c in plan.copies)
    copier = CpuCopier(program)
    copier.bind(trainer.arenas, params)
    copier.run()
    for name in params:
        assert torch.equal(params[name], truth[name]), name
    assert copier.check("full", 0)() == []


# ---------------------------------------------------------------- which source, how many copies


def plan_whole(tensors: dict[str, torch.Tensor]) -> LoadPlan:
    copies = [
        LoadCopy(name, name, Region(whole(t.shape), 0, contiguous_strides(t.shape))) for name, t in tensors.items()
    ]
    return LoadPlan({}, copies)


def replicas(holders: dict[Box, list[int]], nodes: dict[int, str]) -> tuple[dict[str, torch.Tensor], ShardMap]:
    tensors = {"w": torch.randn(8, 4)}
    rows = [("w", rank, 0, 0, Region(box, box[0][0] * 4, (4, 1))) for box, ranks in holders.items() for rank in ranks]
    return tensors, make_map(tensors, rows, nodes)


UPPER, LOWER = ((0, 4), (0, 4)), ((4, 8), (0, 4))


@pytest.mark.parametrize(
    ("neighbour", "expected"), [(0, {0: 128}), (1, {1: 128}), (2, {2: 64, 3: 64}), (3, {3: 64, 0: 64})]
)
def test_the_neighbour_is_read_first_then_the_ranks_after_it(neighbour: int, expected: dict[int, int]) -> None:
    tensors, shards = replicas({UPPER: [0, 1, 2], LOWER: [0, 1, 3]}, dict.fromkeys(range(4), "here"))
    assert compose(plan_whole(tensors), shards, neighbour, "here").bytes_by_rank() == expected


def test_workers_without_a_neighbour_spread_their_reading() -> None:
    tensors, shards = replicas({UPPER: [4, 5, 6, 7], LOWER: [4, 5, 6, 7]}, dict.fromkeys(range(4, 8), "here"))
    sources = [compose(plan_whole(tensors), shards, worker, "here").sources for worker in range(4)]
    assert sorted(rank for found in sources for rank, _ in found) == [4, 5, 6, 7]


def test_a_replica_on_this_node_is_read_before_one_elsewhere() -> None:
    nodes = {0: "there", 1: "there", 2: "here", 3: "there"}
    tensors, shards = replicas({UPPER: [0, 1, 2], LOWER: [0, 1, 3]}, nodes)
    program = compose(plan_whole(tensors), shards, 5, "here")
    assert program.bytes_by_rank() == {2: 64, 1: 64}  # 5 is no rank; counted on from there, 1 comes before 3
    near, remote = program.split([2])
    assert near.sources == [(2, 0)]
    assert [copy.source for copy in remote] == [(1, 0)]


def test_what_nobody_holds_is_refused_by_name() -> None:
    tensors, shards = replicas({UPPER: [0]}, {0: "here"})
    with pytest.raises(WeightSyncError, match=r"no rank holds w \(\(4, 8\), \(0, 4\)\)"):
        compose(plan_whole(tensors), shards, 0, "here")


def test_neighbouring_runs_become_one_copy() -> None:
    """Gate and up lie one after the other in Megatron's fc1 and in vLLM's gate_up_proj: one copy of both."""
    tensors = {"gate": torch.randn(4, 6), "up": torch.randn(4, 6)}
    rows = [
        ("gate", 0, 0, 0, Region(((0, 4), (0, 6)), 0, (6, 1))),
        ("up", 0, 0, 0, Region(((0, 4), (0, 6)), 24, (6, 1))),
    ]
    shards = make_map(tensors, rows, {0: "here"})
    copies = [
        LoadCopy("gate", "gate_up", Region(((0, 4), (0, 6)), 0, (6, 1))),
        LoadCopy("up", "gate_up", Region(((0, 4), (0, 6)), 24, (6, 1))),
    ]
    program = compose(LoadPlan({}, copies), shards, 0, "here")
    assert [(copy.shape, copy.src_strides, copy.dst_strides) for copy in program.copies] == [((48,), (1,), (1,))]


def test_strided_neighbours_become_one_copy_of_more_rows() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5, 4)}
    rows = [("a", 0, 0, 0, Region(((0, 3), (0, 4)), 0, (10, 1))), ("b", 0, 0, 0, Region(((0, 5), (0, 4)), 30, (10, 1)))]
    copies = [
        LoadCopy("b", "w", Region(((0, 5), (0, 4)), 18, (6, 1))),
        LoadCopy("a", "w", Region(((0, 3), (0, 4)), 0, (6, 1))),
    ]
    program = compose(LoadPlan({}, copies), make_map(tensors, rows, {0: "here"}), 0, "here")
    assert [copy.shape for copy in program.copies] == [(8, 4)]
