"""A model that loads weights the way vLLM's do, without vLLM: tensor parallel slices, fused QKV and gate/up, stacked
experts, padded vocabularies, layers that are packed after loading. And trainers' maps of whole tensors."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vime.weight_sync.arena import Handle, Stamp, allocate, node_name
from vime.weight_sync.boxes import Box, contiguous_strides, whole
from vime.weight_sync.checksum import digest
from vime.weight_sync.load_plan import LoadPlan, trace
from vime.weight_sync.shard_map import ShardMap, TensorInfo, describe_rank, merge, place

if TYPE_CHECKING:
    import pytest

VOCAB_MULTIPLE = 48
PACKED = "qkv_proj|w13"
_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


@dataclass(frozen=True)
class Whole:
    """A piece that is a whole tensor in a parameter of the same name."""

    tensor: str
    box: Box
    strides: tuple[int, ...]
    chunk: int = 0
    offset: int = 0

    @property
    def param(self) -> str:
        return self.tensor


def in_arena(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, one after the other in one arena."""
    sizes = {name: -(-tensor.nbytes // 64) * 64 for name, tensor in tensors.items()}
    flat, end, out = allocate(sum(sizes.values())), 0, {}
    for name, tensor in tensors.items():
        out[name] = flat[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end += sizes[name]
    return out


def flip_bit(handle: Handle, byte: int) -> None:
    """Change a byte of the memory behind a handle, which whoever opens it may only read."""
    file = os.open(f"/proc/{handle['pid']}/fd/{handle['fd']}", os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, byte)[0] ^ 4]), byte)
    os.close(file)


def whole_map(tensors: Mapping[str, torch.Tensor], stamp: Stamp, rank: int = 0, node: str | None = None) -> ShardMap:
    """The map of a trainer of one rank that holds whole tensors, each in an arena."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    pieces = [Whole(name, whole(shape), contiguous_strides(shape)) for name, shape in shapes.items()]
    params = {(0, name): tensor for name, tensor in tensors.items()}
    info, places = place(rank, node or node_name(), f"cpu-{rank}", params, stamp)
    return merge([describe_rank(info, places, shapes, pieces, params)], shapes)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class ToyModel:
    """Worker ``rank`` of ``size``. ``packed``: pattern of parameters that are kept transposed after loading."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rank: int = 0,
        size: int = 1,
        packed: str = PACKED,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rank, self.size = rank, size
        self.sizes = {}  # rows of each part of a fused parameter, per worker
        loaded: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            target, part, expert, kind = self._target(name)
            if kind == "rows":
                rows = shape[0] // size
                self.sizes.setdefault(target, {})[part] = rows
                loaded[target] = (sum(self.sizes[target].values()), *shape[1:])
            elif kind == "vocab":
                padded = -(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
                loaded[target] = (-(-padded // size), *shape[1:])
            elif kind == "columns":
                loaded[target] = (shape[0], shape[1] // size)
            elif kind == "w13":
                count = max(expert + 1, loaded.get(target, (0,))[0])
                loaded[target] = (count, 2 * shape[0] // size, shape[1])
            elif kind == "w2":
                count = max(expert + 1, loaded.get(target, (0,))[0])
                loaded[target] = (count, shape[0], shape[1] // size)
            else:
                loaded[target] = shape
        self.load_format = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in loaded.items()}
        self.packed = [name for name in loaded if re.search(packed, name)] if packed else []
        self.live = {
            name: torch.full(shape[::-1] if name in self.packed else shape, float("nan"), dtype=dtype)
            for name, shape in loaded.items()
        }
        self.fails: Exception | None = None  # raised by the next load or settle
        self._plan: LoadPlan | None = None
        self._layers = [PackedLayer(self, name) for name in self.packed]
        self._loading: dict[str, torch.Tensor] | None = None

    def _target(self, name: str) -> tuple[str, int, int, str]:
        """(parameter, part of it, expert, how it is cut) of a checkpoint tensor."""
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert is not None:
            kind = "w2" if expert[3] == "down_proj" else "w13"
            return f"{expert[1]}.{kind}", int(expert[3] == "up_proj"), int(expert[2]), kind
        for own, (fused, part) in _FUSED.items():
            if f".{own}." in name:
                return name.replace(own, fused), part, 0, "rows"
        if "embed_tokens" in name or "lm_head" in name:
            return name, 0, 0, "vocab"
        if "o_proj" in name or "down_proj" in name:
            return name, 0, 0, "columns"
        return name, 0, 0, "whole"

    def _write(self, params: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        target, part, expert, kind = self._target(name)
        param = params[target]
        if kind == "rows":
            rows = self.sizes[target]
            start = sum(count for other, count in rows.items() if other < part)
            param.narrow(0, start, rows[part]).copy_(tensor.narrow(0, self.rank * rows[part], rows[part]))
        elif kind == "vocab":
            start = self.rank * param.shape[0]
            count = max(0, min(param.shape[0], tensor.shape[0] - start))
            if count:
                param[:count].data.copy_(tensor.narrow(0, start, count))
            param[count:].data.fill_(0)
        elif kind == "columns":
            param.copy_(tensor.narrow(1, self.rank * param.shape[1], param.shape[1]))
        elif kind == "w13":
            rows = param.shape[1] // 2
            param[expert].narrow(0, part * rows, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
        elif kind == "w2":
            param[expert].copy_(tensor.narrow(1, self.rank * param.shape[2], param.shape[2]))
        else:
            param.copy_(tensor)

    # ---- what a session needs ----

    def trace(self, tensors: Mapping[str, TensorInfo]) -> LoadPlan:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self._write(self.load_format, name, tensor)

        self._plan = trace(self.load_format, tensors, load)
        return self._plan

    def direct(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.live.items() if name not in self.packed}

    def staged(self) -> list[PackedLayer]:
        return self._layers

    def settle(self) -> None:
        self._maybe_fail()

    def begin_load(self) -> None:
        self._loading = {name: torch.full(t.shape, float("nan"), dtype=t.dtype) for name, t in self.load_format.items()}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self._loading is not None
        self._maybe_fail()
        for name, tensor in weights:
            self._write(self._loading, name, tensor)

    def end_load(self) -> None:
        assert self._loading is not None
        for name, tensor in self._loading.items():
            self.live[name].copy_(tensor.permute(*range(tensor.dim())[::-1]) if name in self.packed else tensor)
        self._loading = None

    def abort_load(self) -> None:
        self._loading = None

    def poison(self) -> None:
        for tensor in self.live.values():
            tensor.fill_(float("nan"))

    def digests(self) -> dict[str, int]:
        return {name: digest(tensor) for name, tensor in self.live.items()}

    def _maybe_fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error


class PackedLayer:
    """Holds one parameter transposed; a new tensor of it comes in load format."""

    def __init__(self, model: ToyModel, name: str) -> None:
        self.model, self.params = model, [name]
        self._staging: torch.Tensor | None = None

    def open(self) -> dict[str, torch.Tensor]:
        meta = self.model.load_format[self.params[0]]
        self._staging = torch.zeros(meta.shape, dtype=meta.dtype)
        return {self.params[0]: self._staging}

    def close(self) -> None:
        assert self._staging is not None
        self.model.live[self.params[0]].copy_(self._staging.permute(*range(self._staging.dim())[::-1]))
        self._staging = None

    def abort(self) -> None:
        self._staging = None


class LoadFormatTensors:
    """Called: how many load-format tensors of packed layers are still alive. ``when_closed``: the same, at every
    layer's close."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.when_closed: list[int] = []
        self._born: list[weakref.ref[torch.UntypedStorage]] = []
        opens, closes = PackedLayer.open, PackedLayer.close

        def remember(layer: PackedLayer) -> dict[str, torch.Tensor]:
            tensors = opens(layer)
            self._born.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors.values())
            return tensors

        def count(layer: PackedLayer) -> None:
            self.when_closed.append(self())
            closes(layer)

        monkeypatch.setattr(PackedLayer, "open", remember)
        monkeypatch.setattr(PackedLayer, "close", count)

    def __call__(self) -> int:
        return sum(storage() is not None for storage in self._born)


def loaded(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    rank: int = 0,
    size: int = 1,
    packed: str = PACKED,
) -> ToyModel:
    """The model after loading whole tensors by its own loader: what a sync must leave."""
    model = ToyModel(shapes, rank, size, packed)
    model.begin_load()
    model.load(tensors.items())
    model.end_load()
    return model
