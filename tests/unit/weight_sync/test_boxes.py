"""Boxes against brute force: every index of the tensor, one by one."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.weight_sync.boxes import (
    Box,
    Region,
    box_shape,
    contiguous_strides,
    intersect,
    regions_of_view,
    subtract,
    volume,
    whole,
)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    def box() -> Box:
        spans = [sorted(draw(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True))) for _ in range(dims)]
        return tuple((a, b) for a, b in spans)

    dims = draw(st.integers(0, 3))
    return box(), box()


@given(two_boxes())
@settings(max_examples=500, deadline=None)
def test_intersection_and_difference_are_those_of_the_index_sets(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    common = intersect(a, b)
    assert (indices(common) if common is not None else set()) == indices(a) & indices(b)
    rest = subtract(a, b)
    assert sum(map(volume, rest)) == len(indices(a) - indices(b))  # disjoint
    assert set().union(*map(indices, rest)) == indices(a) - indices(b)


def test_region_position_counts_from_the_box() -> None:
    region = Region(((2, 6), (1, 4)), offset=100, strides=(10, 2))
    assert region.position(((2, 6), (1, 4))) == 100
    assert region.position(((3, 5), (3, 4))) == 100 + 10 + 4


def replay(source: torch.Tensor, target: torch.Tensor, regions: list[Region]) -> None:
    for region in regions:
        part = source[tuple(slice(a, b) for a, b in region.box)]
        target.view(-1).as_strided(box_shape(region.box), region.strides, region.offset).copy_(part)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of distinct numbers and a view of it made the way weight loaders make them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    view = tensor
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "transpose", "select", "unsqueeze", "reshape", "squeeze"]))
        dim = draw(st.integers(0, max(view.dim() - 1, 0)))
        if kind == "narrow" and view.dim():
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "transpose" and view.dim():
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "select" and view.dim() > 1:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "unsqueeze" and view.dim() < 4:
            view = view.unsqueeze(dim)
        elif kind == "squeeze":
            view = view.squeeze()
        elif kind == "reshape" and view.is_contiguous() and view.dim():
            size = view.shape[dim]
            parts = [k for k in range(1, size + 1) if size % k == 0]
            k = draw(st.sampled_from(parts))
            view = view.view(*view.shape[:dim], k, size // k, *view.shape[dim + 1 :])
    return tensor, view


@given(views(), st.data())
@settings(max_examples=1000, deadline=None)
def test_a_view_becomes_boxes_that_copy_the_same_elements(pair: tuple[torch.Tensor, torch.Tensor], data) -> None:
    source, view = pair
    # The destination: the same size inside a larger parameter, its dimensions in any order.
    order = data.draw(st.permutations(range(view.dim())))
    grown = torch.zeros([view.shape[k] + data.draw(st.integers(0, 2)) for k in order], dtype=torch.long)
    part = grown
    for position, k in enumerate(order):
        part = part.narrow(position, grown.shape[position] - view.shape[k], view.shape[k])
    part = part.permute([list(order).index(k) for k in range(view.dim())])
    regions = regions_of_view(
        source.shape, view.shape, view.stride(), int(view.storage_offset()), part.stride(), int(part.storage_offset())
    )
    assert regions is not None
    ours = torch.zeros_like(grown)
    replay(source, ours, regions)
    part.copy_(view)
    assert torch.equal(ours, grown)


def test_a_broadcast_is_refused() -> None:
    view = torch.arange(12).view(3, 4)[0:1].expand(3, 4)
    assert regions_of_view((3, 4), view.shape, view.stride(), 0, (4, 1), 0) is None


def test_a_view_of_very_many_boxes_is_refused() -> None:
    view = torch.arange(10000)[::2]
    assert regions_of_view((10000,), view.shape, view.stride(), 0, (1,), 0) is None


def test_the_common_case_is_one_region() -> None:
    assert regions_of_view((8, 6), (4, 6), (6, 1), 24, (6, 1), 0) == [Region(((4, 8), (0, 6)), 0, (6, 1))]
    assert whole((2, 3)) == ((0, 2), (0, 3))
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
