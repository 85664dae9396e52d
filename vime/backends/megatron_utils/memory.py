"""Where the trainer's memory lies: parameters in arenas that engines map, the rest movable to the host and back.

Megatron's DDP keeps parameters in flat buffers if the distributed optimizer is used; otherwise each has memory of its
own. :func:`flatten_parameters` makes both the same: every parameter becomes a view into one of a few flat buffers whose
memory the caller chooses, and keeps its identity. It runs once, after DDP and before the optimizer, which keeps views
of the parameters. From then on the optimizer and its parameter gather write into these buffers in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, str]  # model chunk, parameter name in it
Allocate = Callable[[int], Tensor]  # bytes -> flat uint8 tensor of at least as many, zeroed, on the trainer's device
ALIGNMENT = 256  # bytes; 16-byte copies and NCCL both want aligned starts


@dataclass(frozen=True)
class ParameterArena:
    """One flat buffer: ``buffer`` uint8 [bytes], and where each parameter begins in it."""

    buffer: Tensor
    offsets: dict[Key, int]  # in bytes


def flatten_parameters(
    named_params: Mapping[Key, torch.nn.Parameter], ddp_chunks: Sequence[Any], allocate: Allocate
) -> list[ParameterArena]:
    """Move all parameters into flat buffers from ``allocate``. Values, identities and Megatron's views are kept."""
    keys = {id(parameter): key for key, parameter in named_params.items()}
    arenas = []
    for ddp in ddp_chunks:
        for megatron_buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            if megatron_buffer.param_data is not None:
                arenas.append(_rebase(megatron_buffer, keys, allocate))
    placed = {key for arena in arenas for key in arena.offsets}
    rest = {key: parameter for key, parameter in named_params.items() if key not in placed}
    if rest:
        arenas.append(_lay_out(rest, allocate))
    return arenas


def _rebase(buffer: Any, keys: Mapping[int, Key], allocate: Allocate) -> ParameterArena:
    """Give a Megatron param buffer other memory: itself, its buckets and its parameters."""
    old: Tensor = buffer.param_data
    arena = allocate(old.nbytes)
    new = arena[: old.nbytes].view(old.dtype)
    new.copy_(old)
    offsets = {}
    for parameter, (start, end, _) in buffer.param_index_map.items():
        parameter.data = new[start:end].view(parameter.shape)
        offsets[keys[id(parameter)]] = start * old.element_size()
    for bucket in buffer.buckets:
        bucket.param_data = new[bucket.offset : bucket.offset + bucket.param_data.numel()]
    buffer.param_data = new
    return ParameterArena(arena, offsets)


def _lay_out(parameters: Mapping[Key, torch.nn.Parameter], allocate: Allocate) -> ParameterArena:
    """One buffer in the parameters' order, but experts' matrices of one kind side by side (experts.stacked)."""

    def place(item: tuple[int, Key]) -> tuple[object, ...]:
        order, (chunk, name) = item
        expert = re.fullmatch(r"(.*\.local_experts)\.(\d+)\.(.*)", name)
        if expert is None:
            return (chunk, order, "", 0)
        first = first_of.setdefault((chunk, expert[1]), order)
        return (chunk, first, expert[3], int(expert[2]))

    first_of: dict[Key, int] = {}
    ordered = [key for _, key in sorted(enumerate(parameters), key=place)]
    offsets, end = {}, 0
    for key in ordered:
        offsets[key] = end
        end += -(-parameters[key].nbytes // ALIGNMENT) * ALIGNMENT
    arena = allocate(end)
    for key, parameter in parameters.items():
        view = arena[offsets[key] : offsets[key] + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
    return ParameterArena(arena, offsets)


class WeightCopy:
    """A copy of all arenas in host memory (pinned beside a GPU), allocated once."""

    def __init__(self, arenas: Sequence[ParameterArena]) -> None:
        self._arenas = arenas
        self._host = [_host_like(arena.buffer) for arena in arenas]

    def take(self) -> None:
        """Copy the weights to the host."""
        for arena, host in zip(self._arenas, self._host, strict=True):
            host.copy_(arena.buffer, non_blocking=True)
        _synchronize(self._host)

    def put(self) -> None:
        """Copy the host's weights into the parameters, byte for byte."""
        for arena, host in zip(self._arenas, self._host, strict=True):
            arena.buffer.copy_(host, non_blocking=True)
        _synchronize(self._host)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _synchronize(tensors: Iterable[Tensor]) -> None:
    if any(tensor.is_pinned() for tensor in tensors):
        torch.cuda.synchronize()


class Movable:
    """GPU tensors that can give their memory back and take it again, so that every view of them stays valid.

    Host buffers are pinned and allocated once: allocating 4 GiB of pinned memory takes seconds, copying it 0.08 s.
    """

    def __init__(self) -> None:
        self._host: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor's id: it (so that it keeps its id), its copy
        self._away: list[tuple[Tensor, int, Tensor | None]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    @torch.no_grad()
    def move_out(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> int:
        """Free the memory of ``kept`` (copied to the host first) and ``dropped`` (zero when back). Returns bytes."""
        freed = 0
        kept = _storage_owners(kept)
        for tensor in kept:
            if id(tensor) not in self._host:
                self._host[id(tensor)] = (tensor, _host_like(tensor))
            self._host[id(tensor)][1].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for tensor in kept:
            freed += self._free(tensor, self._host[id(tensor)][1])
        for tensor in _storage_owners(dropped):
            freed += self._free(tensor, None)
        torch.cuda.empty_cache()
        return freed

    def _free(self, tensor: Tensor, host: Tensor | None) -> int:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        self._away.append((tensor, size, host))
        return size

    @torch.no_grad()
    def move_in(self) -> int:
        """Take the memory again and restore it. Returns bytes."""
        taken = 0
        for tensor, size, host in self._away:
            tensor.untyped_storage().resize_(size)
            if host is None:
                tensor.zero_()
            else:
                tensor.copy_(host, non_blocking=True)
            taken += size
        self._away.clear()
        torch.cuda.synchronize()
        return taken


def _storage_owners(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor per storage; each must cover its whole storage, or the rest of it would be lost."""
    seen, owners = set(), []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        assert tensor.nbytes == storage.nbytes(), "a view of a part of its storage cannot be moved"
        owners.append(tensor)
    return owners


def optimizer_tensors(optimizer: Any, arenas: Sequence[ParameterArena]) -> list[Tensor]:
    """Master weights and moments of a Megatron optimizer, where they are not the parameters themselves."""
    weights = {arena.buffer.untyped_storage().data_ptr() for arena in arenas}
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            found += group["params"]
        for state in part.optimizer.state.values():
            found += [value for value in state.values() if torch.is_tensor(value) and value.is_cuda and value.dim() > 0]
    return [t for t in found if t.is_cuda and t.untyped_storage().data_ptr() not in weights]


def gradient_buffers(ddp_chunks: Sequence[Any]) -> list[Tensor]:
    return [buffer.grad_data for ddp in ddp_chunks for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]


def memory_report(device: torch.device, arenas: Sequence[ParameterArena], grads: Sequence[Tensor]) -> dict[str, int]:
    """Bytes: ``weights``, ``gradients``, and on a GPU ``allocated``, ``reserved`` and ``free``."""
    report = {
        "weights": sum(arena.buffer.untyped_storage().nbytes() for arena in arenas),
        "gradients": sum(grad.untyped_storage().nbytes() for grad in grads),
    }
    if device.type == "cuda":
        report["allocated"] = torch.cuda.memory_allocated(device)
        report["reserved"] = torch.cuda.memory_reserved(device)
        report["free"] = torch.cuda.mem_get_info(device)[0]
    return report
