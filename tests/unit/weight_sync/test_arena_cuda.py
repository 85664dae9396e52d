"""GPU arenas without a GPU: what travels, what is mapped how often, and the words of each refusal.

The driver is stood in for by one that "allocates" host memory. What only a GPU can show (that a handle opens in another
process, and what it costs) the benchmarks show.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vime.weight_sync import arena_cuda
from vime.weight_sync.arena import ArenaError, open_arena, sealed
from vime.weight_sync.arena_cuda import cuda_arena_of

ALLOCATION = 1 << 20  # what the driver gives out; torch's allocator puts several storages into it


class Error(int):
    name = "cudaErrorInvalidValue"


OK = Error(0)


class Driver:
    """Allocations with handles, and what was opened and closed."""

    def __init__(self) -> None:
        self.block = torch.zeros(ALLOCATION, dtype=torch.uint8)
        self.base = self.block.data_ptr()
        self.handle = bytes(range(64))
        self.error = self.sharing_error = OK
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self.errors_taken = 0

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """A tensor with a storage of its own inside the allocation."""
        return torch.frombuffer(self.block.numpy(), dtype=dtype, count=count, offset=offset)

    def modules(self) -> dict[str, Any]:
        runtime = types.SimpleNamespace(
            cudaIpcMemHandle_t=types.SimpleNamespace,
            cudaIpcMemLazyEnablePeerAccess=1,
            cudaIpcGetMemHandle=self._get_handle,
            cudaIpcOpenMemHandle=self._open,
            cudaIpcCloseMemHandle=self.closed.append,
            cudaGetLastError=self._take_error,
        )
        driver = types.SimpleNamespace(CUdeviceptr=int, cuMemGetAddressRange=self._range)
        bindings: Any = types.ModuleType("cuda.bindings")
        bindings.runtime, bindings.driver = runtime, driver
        return {"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings}

    def _range(self, address: int) -> tuple[Error, int, int]:
        assert self.base <= address < self.base + ALLOCATION
        return self.error, self.base, ALLOCATION

    def _get_handle(self, base: int) -> tuple[Error, Any]:
        assert base == self.base  # the handle of the whole allocation is asked for
        return self.sharing_error, types.SimpleNamespace(reserved=self.handle)

    def _open(self, handle: Any, flags: int) -> tuple[Error, int]:
        if self.error == OK:
            self.opened.append(handle.reserved)
        return self.error, self.base

    def _take_error(self) -> None:
        self.errors_taken += 1


def wrap(window: Any, device: str) -> torch.Tensor:
    """As torch.as_tensor does with a GPU's memory: no copy, and the window lives as long as a tensor over it."""
    assert device == "cuda:0"
    about = window.__cuda_array_interface__
    (size,), (address, read_only) = about["shape"], about["data"]
    assert (about["typestr"], about["version"], read_only) == ("|u1", 2, False)
    memory = type("Memory", (ctypes.c_uint8 * size,), {}).from_address(address)  # type: ignore[misc]
    memory.window = window
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    for name, module in driver.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    properties = types.SimpleNamespace(uuid="0123-abcd")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch, "as_tensor", wrap)
    yield driver
    gc.collect()
    assert not arena_cuda._MAPPINGS


def test_a_parameter_is_found_again_through_its_handle_as_json(driver: Driver) -> None:
    storage = driver.tensor(torch.bfloat16, 1000, offset=4096)
    param = storage[100:164].view(8, 8)
    arena, offset = cuda_arena_of(param)
    assert offset == 200
    assert arena.tensor.nbytes == 2000  # the storage, not the allocation
    handle = json.loads(json.dumps(arena.describe()))
    assert handle == arena.describe() | {"kind": "cuda_ipc", "offset": 4096, "bytes": 2000, "device": "GPU-0123-abcd"}
    assert bytes.fromhex(handle["handle"]) == driver.handle
    opened = open_arena(handle)
    assert (opened.dtype, opened.shape) == (torch.uint8, (2000,))
    param.copy_(torch.arange(64).view(8, 8))
    assert opened[offset : offset + 128].view(torch.bfloat16).tolist() == list(range(64))


def test_arenas_of_one_allocation_share_a_mapping_that_the_last_reader_ends(driver: Driver) -> None:
    handles = [cuda_arena_of(driver.tensor(torch.uint8, 512, offset))[0].describe() for offset in (0, 1024)]
    first, second = map(open_arena, handles)
    assert driver.opened == [driver.handle]
    view = first[100:200].view(torch.int32)
    del first, second
    gc.collect()
    assert driver.closed == []  # a view still reads it
    del view
    gc.collect()
    assert driver.closed == [driver.base]
    again = open_arena(handles[0])
    assert driver.opened == [driver.handle] * 2
    del again
    gc.collect()
    assert driver.closed == [driver.base] * 2


def test_memory_of_expandable_segments_is_refused_with_the_setting_that_helps(driver: Driver) -> None:
    arena, _ = cuda_arena_of(driver.tensor(torch.uint8, 512, 0))
    driver.sharing_error = Error(1)
    with pytest.raises(ArenaError) as raised:
        arena.describe()
    said = str(raised.value)
    assert said.startswith("512 bytes of GPU memory cannot be shared with the engine (cudaErrorInvalidValue)")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in said


def test_memory_that_the_driver_does_not_know_is_refused(driver: Driver) -> None:
    arena, _ = cuda_arena_of(driver.tensor(torch.uint8, 512, 0))
    driver.error = Error(1)
    with pytest.raises(ArenaError, match=r"^finding an allocation failed: cudaErrorInvalidValue$"):
        arena.describe()


def test_a_trainer_that_is_gone_is_named_and_the_error_does_not_come_up_again(driver: Driver) -> None:
    handle = cuda_arena_of(driver.tensor(torch.uint8, 512, 0))[0].describe()
    driver.error = Error(1)
    with pytest.raises(ArenaError) as raised:
        open_arena(sealed(handle | {"pid": 4711}))
    assert "cannot map the trainer's memory on GPU-0123-abcd (cudaErrorInvalidValue)" in str(raised.value)
    assert "(process 4711) must be alive, on this node, of the same user" in str(raised.value)
    assert driver.errors_taken == 1
    driver.error = OK
    assert open_arena(handle).numel() == 512  # the failed attempt is not remembered
