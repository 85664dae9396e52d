"""Load plan: where each checkpoint tensor goes in one worker of an engine.

The engine's own ``load_weights`` is run once on *meta* sources, under a dispatch mode that writes down every copy into
a parameter instead of doing it. Tensor parallel slicing, fused QKV and gate/up, stacked experts and padded
vocabularies come out right because the engine's own loaders did the slicing. Whatever is not a plain copy or a fill is
a *problem*: its parameter cannot be written by plan, and the caller takes another way for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vime.weight_sync.boxes import Box, Ints, Region, contiguous_strides, regions_of_view, subtract, volume
from vime.weight_sync.shard_map import TensorInfo

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LoadCopy:
    """``region.box`` of ``tensor`` goes to ``region`` of ``param``, counted in elements from the parameter's first."""

    tensor: str
    param: str
    region: Region


@dataclass(frozen=True, slots=True)
class LoadFill:
    """A constant in part of a parameter (the padding of a vocabulary). Fills come before copies."""

    param: str
    shape: Ints
    strides: Ints
    offset: int
    value: float


@dataclass(frozen=True)
class ParamInfo:
    """The parameter in the layout that weights are loaded in."""

    shape: Ints
    strides: Ints
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class LoadPlan:
    """What one call of ``load_weights`` with all checkpoint tensors does."""

    params: dict[str, ParamInfo]
    copies: list[LoadCopy] = field(default_factory=list)
    fills: list[LoadFill] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # parameter -> why it cannot be planned
    unused: list[str] = field(default_factory=list)  # checkpoint tensors that no parameter takes anything from
    # Parameter -> elements that nothing writes, of those that a checkpoint has to write. Problems are not in it.
    unwritten: dict[str, int] = field(default_factory=dict)

    @property
    def written(self) -> list[str]:
        """Parameters that the plan writes, in the order of the first write."""
        return list(dict.fromkeys([c.param for c in self.copies] + [f.param for f in self.fills]))


@dataclass(frozen=True, slots=True)
class _Write:
    """One recorded operation; ``tensor`` is None for a fill."""

    param: str
    size: Ints
    stride: Ints
    offset: int
    tensor: str | None
    source: torch.Tensor | None
    value: float = 0.0


class _Recorder(TorchDispatchMode):
    """Writes down (and does not run) what is done to a parameter."""

    def __init__(self, params: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        # By storage: loaders write through views. A tied parameter has one storage and goes by its first name.
        self.params: dict[int, str] = {}
        for name, tensor in params.items():
            self.params.setdefault(tensor.untyped_storage()._cdata, name)
        self.sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self.keep = (params, sources)  # an address must not be given to another tensor while we know it by that
        self.dtypes = {name: tensor.dtype for name, tensor in params.items()}
        self.writes: list[_Write] = []
        self.problems: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return func(*args, **kwargs)
        if func in (aten._to_copy.default, aten.clone.default) and target.untyped_storage()._cdata in self.sources:
            if kwargs.get("dtype") in (None, target.dtype):
                return target  # moved to a device or made contiguous: the same numbers
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        for written in _written(func, args, kwargs):  # a checkpoint tensor that the loader changes is none any more
            self.sources.pop(written.untyped_storage()._cdata, None)
        param = self.params.get(target.untyped_storage()._cdata)
        if param is None:
            return func(*args, **kwargs)
        self._write(param, target, func, args)
        return target

    def _write(self, param: str, target: torch.Tensor, func: Any, args: tuple) -> None:
        where = (param, tuple(target.size()), tuple(target.stride()), int(target.storage_offset()))
        if target.dtype != self.dtypes[param]:
            self.problems[param] = f"written as {target.dtype} where it is {self.dtypes[param]}"
        elif func is aten.copy_.default and isinstance(args[1], torch.Tensor):
            name = self.sources.get(args[1].untyped_storage()._cdata)
            if name is None:
                self.problems[param] = "its values are computed, not copied"
            elif args[1].shape != target.shape:
                self.problems[param] = f"{name} is broadcast into it"
            else:
                self.writes.append(_Write(*where, name, args[1]))
        elif func is aten.fill_.Scalar:
            self.writes.append(_Write(*where, None, None, float(args[1])))
        elif func is aten.zero_.default:
            self.writes.append(_Write(*where, None, None))
        else:
            self.problems[param] = f"changed in place by {func}"


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes to."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
            yield value


def trace(
    params: Mapping[str, torch.Tensor],
    tensors: Mapping[str, TensorInfo],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    free: Collection[str] = (),
) -> LoadPlan:
    """Run ``load`` on meta sources and return what it would have written.

    Args:
        params: name -> parameter or buffer, in load format; meta or real. Nothing is written to any of them.
        tensors: the checkpoint tensors, in the order they are given to ``load``.
        load: the model's ``load_weights``.
        free: parameters that are whole without a checkpoint's help.

    Raises:
        Whatever ``load`` raises, for instance because it looks at a value. Then nothing of this model can be planned.
    """
    sources = {
        name: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta") for name, info in tensors.items()
    }
    with torch.no_grad(), _Recorder(params, sources) as recorder:
        load(iter(sources.items()))
    plan = LoadPlan({n: ParamInfo(tuple(t.shape), tuple(t.stride()), t.dtype) for n, t in params.items()})
    plan.problems = recorder.problems
    writes: dict[str, list[_Write]] = defaultdict(list)
    for write in recorder.writes:
        if write.param not in plan.problems and 0 not in write.size:
            writes[write.param].append(write)
    shapes = {name: info.shape for name, info in tensors.items()}
    for name in writes:
        _settle(plan, name, writes[name], shapes, int(params[name].storage_offset()))
    for name, tensor in params.items():
        is_known_by_another_name = recorder.params[tensor.untyped_storage()._cdata] != name
        if not (name in writes or name in plan.problems or name in free or is_known_by_another_name):
            plan.unwritten[name] = tensor.numel()
    plan.unwritten = {name: count for name, count in plan.unwritten.items() if count}
    used = {copy.tensor for copy in plan.copies} | {
        write.tensor for write in recorder.writes if write.param in plan.problems
    }
    plan.unused = [name for name in tensors if name not in used]
    return plan


def _settle(plan: LoadPlan, name: str, writes: list[_Write], shapes: Mapping[str, Ints], first: int) -> None:
    """Turn one parameter's writes, in their order, into copies and fills whose order does not matter."""
    info = plan.params[name]
    if info.strides != contiguous_strides(info.shape):
        plan.problems[name] = f"its load format is not contiguous: {info.shape}, strides {info.strides}"
        return
    boxes: list[Box] = []
    for write in writes:
        box = _box_in(info.shape, write, first)
        if box is None:
            plan.problems[name] = f"written through a view that is no box: {write.size}, strides {write.stride}"
            return
        boxes.append(box)
    kept = _without_overwritten(writes, boxes)
    if kept is None:
        plan.problems[name] = "a later write covers an earlier one in part"
        return
    for index in kept:
        write = writes[index]
        offset = write.offset - first
        if write.source is None or write.tensor is None:
            plan.fills.append(LoadFill(name, write.size, write.stride, offset, write.value))
            continue
        source, shape = write.source, shapes[write.tensor]
        regions = regions_of_view(
            shape, source.shape, source.stride(), int(source.storage_offset()), write.stride, offset
        )
        if regions is None:
            plan.problems[name] = f"{write.tensor} is read through a view that is no box"
            plan.copies = [copy for copy in plan.copies if copy.param != name]
            plan.fills = [fill for fill in plan.fills if fill.param != name]
            return
        plan.copies += [LoadCopy(write.tensor, name, region) for region in regions]
    left = torch.Size(info.shape).numel() - _union([boxes[index] for index in kept])
    if left:
        plan.unwritten[name] = left


def _box_in(shape: Ints, write: _Write, first: int) -> Box | None:
    found = regions_of_view(shape, write.size, write.stride, write.offset - first, write.stride, 0)
    return found[0].box if found is not None and len(found) == 1 else None


def _overlaps(boxes: list[Box]) -> np.ndarray:
    """Pairs (i, j), i < j, of boxes that have an element in common: int [pairs, 2]."""
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(boxes[0]), 2)
    starts, stops = bounds[:, :, 0], bounds[:, :, 1]
    both = np.ones((len(boxes), len(boxes)), dtype=bool)
    for dim in range(bounds.shape[1]):
        both &= starts[:, None, dim] < stops[None, :, dim]
        both &= starts[None, :, dim] < stops[:, None, dim]
    return np.argwhere(np.triu(both, 1))


def _without_overwritten(writes: list[_Write], boxes: list[Box]) -> list[int] | None:
    """Indices of the writes whose result is still there at the end. None where only part of a copy's is."""
    gone: set[int] = set()
    for early, late in _overlaps(boxes)[::-1].tolist():
        if not subtract(boxes[early], boxes[late]):
            gone.add(early)
        elif writes[early].source is not None or writes[late].source is None:
            return None  # what a copy writes over an earlier fill is fine: all fills run first
    return [index for index in range(len(writes)) if index not in gone]


def _union(boxes: list[Box]) -> int:
    """Elements in at least one of the boxes."""
    if not len(_overlaps(boxes)):
        return sum(map(volume, boxes))
    disjoint: list[Box] = []
    for box in boxes:
        parts = [box]
        for other in disjoint:
            parts = [rest for part in parts for rest in subtract(part, other)]
        disjoint += parts
    return sum(map(volume, disjoint))
