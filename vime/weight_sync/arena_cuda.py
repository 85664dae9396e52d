"""Arenas in GPU memory, shared by raw CUDA IPC handles.

Torch's own way to share a GPU tensor (``torch.multiprocessing.reductions``) sends a pickle and counts references in a
file. A raw handle is 64 bytes, names a whole allocation of the driver, and opens in any process of the same user on the
node, also in one that sees only another GPU of it. The trainer's allocator makes allocations larger than the tensors
in them, so a handle comes with an offset.

An allocation that a reader has mapped is not given back when its owner frees it: readers drop their arenas first
(:meth:`vime.weight_sync.receiver.Receiver.close`).
"""

# What this reaches into has no usable types, where it is installed at all (it comes with a CUDA build of torch).
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vime.weight_sync.arena import ArenaError, Handle, sealed

KIND = "cuda_ipc"
# On an H200 a link that carries nothing for 50 ms sleeps, and takes 0.17 ms to wake: a tenth of a small model's copy.
# All links of a GPU take turns by address: places so far apart, in the largest so many arenas, are enough.
_APART, _MOST = 64 << 10, 4


@dataclass(frozen=True, eq=False)
class CudaArena:
    """A block of GPU memory of this process. ``tensor`` is all of it, flat uint8."""

    tensor: torch.Tensor

    def describe(self) -> Handle:
        """What another process needs for :func:`open_cuda_arena`.

        Raises:
            ArenaError: memory that has no such handle.
        """
        from cuda.bindings import driver, runtime  # pyright: ignore[reportMissingImports]  # beside every CUDA torch

        with torch.cuda.device(self.tensor.device):
            address = self.tensor.data_ptr()
            base, _ = checked(driver.cuMemGetAddressRange(driver.CUdeviceptr(address)), "finding an allocation")
            error, handle = runtime.cudaIpcGetMemHandle(int(base))
            if int(error) != 0:
                raise ArenaError(
                    f"{self.tensor.nbytes} bytes of GPU memory cannot be shared with the engine ({error.name}): memory "
                    "of expandable segments has no IPC handle. Start the trainer with "
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (and PYTORCH_ALLOC_CONF likewise)"
                )
        return sealed(
            {
                "kind": KIND,
                "pid": os.getpid(),
                "device": device_uuid(self.tensor.device),
                "handle": bytes(handle.reserved).hex(),
                "offset": address - int(base),
                "bytes": self.tensor.nbytes,
            }
        )

    def close(self) -> None:
        """Nothing to give up: the memory is shared as long as it is allocated."""


def cuda_arena_of(tensor: torch.Tensor) -> tuple[CudaArena, int]:
    """The arena that ``tensor`` lies in, which is its storage, and its offset there in bytes."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return CudaArena(whole), int(tensor.storage_offset()) * tensor.element_size()


def device_uuid(device: torch.device | int | None = None) -> str:
    """The physical GPU, whatever CUDA_VISIBLE_DEVICES makes its number."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class _Mapping:
    """Another process's allocation in this one's address space, until the last tensor over it is gone."""

    def __init__(self, handle: Handle) -> None:
        from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

        opaque = runtime.cudaIpcMemHandle_t()
        opaque.reserved = bytes.fromhex(handle["handle"])
        error, pointer = runtime.cudaIpcOpenMemHandle(opaque, runtime.cudaIpcMemLazyEnablePeerAccess)
        if int(error) != 0:
            runtime.cudaGetLastError()  # it would come up again in torch's next call
            raise ArenaError(
                f"cannot map the trainer's memory on {handle['device']} ({error.name}); the trainer (process "
                f"{handle['pid']}) must be alive, on this node, of the same user, and its GPU within reach of "
                f"{device_uuid()} (nvidia-smi topo -p2p r)"
            )
        self.pointer = int(pointer)
        self._finalizer = weakref.finalize(self, _unmap, self.pointer, torch.cuda.current_device())
        self._finalizer.atexit = False  # the driver does it then, and may be gone already


def _unmap(pointer: int, device: int) -> None:
    from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # nothing may be reading it
        runtime.cudaIpcCloseMemHandle(pointer)


class _Window:
    """What ``torch.as_tensor`` wraps without a copy, and keeps as long as any view of it lives."""

    def __init__(self, mapping: _Mapping, offset: int, size: int) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (mapping.pointer + offset, False),
            "version": 2,
        }


_MAPPINGS: weakref.WeakValueDictionary[tuple[int, str], _Mapping] = weakref.WeakValueDictionary()


def open_cuda_arena(handle: Handle) -> torch.Tensor:
    """Map another process's arena: flat uint8, [bytes], addressed through this process's current device.

    Several arenas in one allocation share one mapping. Dropping all tensors over it unmaps it.

    Raises:
        ArenaError: the owner is gone, or its GPU is out of reach.
    """
    key = (torch.cuda.current_device(), handle["handle"])
    mapping = _MAPPINGS.get(key)
    if mapping is None:
        mapping = _MAPPINGS[key] = _Mapping(handle)
    return torch.as_tensor(_Window(mapping, handle["offset"], handle["bytes"]), device=f"cuda:{key[0]}")


def wake_links(arenas: Sequence[torch.Tensor]) -> None:
    """Enqueue that a little is read here and there in these arenas of one other GPU: its links wake while the host is
    busy with something else."""
    for arena in sorted(arenas, key=torch.Tensor.numel, reverse=True)[:_MOST]:
        arena[::_APART].any()


def checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """What a call of the driver has answered beside its success.

    Raises:
        ArenaError: it has failed.
    """
    error, *values = result
    if int(error) != 0:
        raise ArenaError(f"{what} failed: {error.name}")
    return tuple(values)
