"""benchmarks/known_weights.py: every layout holds the same checkpoint, and no part of it looks like another."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.known_weights import KnownWeights
from tests.unit.models.test_layout import ALL_MOE, make_spec
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec

LAYOUTS = {
    "TP1": ParallelLayout(1),
    "TP2": ParallelLayout(2, tp=2, etp=2),
    "PP2": ParallelLayout(2, pp=2),
    "CP2": ParallelLayout(2, cp=2),
    "EP2": ParallelLayout(2, ep=2),
    "TP2 EP2": ParallelLayout(2, tp=2, ep=2),
}


def held(spec: ModelSpec, layout: ParallelLayout, dtype: torch.dtype, state: int) -> list[dict[str, torch.Tensor]]:
    """Of every rank what it holds of each checkpoint tensor; NaN elsewhere."""
    shapes, found = checkpoint_tensors(spec), []
    for rank in range(layout.world_size):
        params = {key: torch.zeros(shape, dtype=dtype) for key, shape in parameter_shapes(spec, layout, rank).items()}
        KnownWeights(spec, layout, rank, params).become(state)
        mine: dict[str, torch.Tensor] = {}
        for piece in pieces(spec, layout, rank):
            whole = mine.setdefault(piece.tensor, torch.full(shapes[piece.tensor], float("nan"), dtype=dtype))
            whole[piece.slices] = piece.view(params[piece.chunk, piece.param])
        found.append(mine)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_holds_the_same(layout: str, dtype: torch.dtype) -> None:
    spec = make_spec(**ALL_MOE, tied=True)
    (expected,) = held(spec, LAYOUTS["TP1"], dtype, -3)
    for rank in held(spec, LAYOUTS[layout], dtype, -3):
        for name, tensor in rank.items():
            here = ~tensor.isnan()
            assert here.any(), name
            assert torch.equal(tensor[here], expected[name][here]), name


def test_no_part_is_like_another() -> None:
    """Neither two tensors nor two cuts of one, in any dimension."""
    spec = make_spec(**ALL_MOE, tied=True)
    (whole,) = held(spec, LAYOUTS["TP1"], torch.bfloat16, 0)
    for one, other in itertools.combinations(whole, 2):
        if whole[one].shape == whole[other].shape:
            assert not torch.equal(whole[one], whole[other]), (one, other)
    for name, tensor in whole.items():
        for dim in range(tensor.dim()):
            first, second = tensor.split(tensor.shape[dim] // 2, dim)[:2]
            assert (first == second).float().mean() < 0.1, name


def test_states_differ_everywhere() -> None:
    spec = make_spec(**ALL_MOE)
    states = [held(spec, LAYOUTS["TP1"], torch.bfloat16, state)[0] for state in (0, 1, 127, 128)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[3][name])
        assert not (tensor == states[1][name]).any()
        assert not (states[1][name] == states[2][name]).any()
        assert tensor.isfinite().all()
