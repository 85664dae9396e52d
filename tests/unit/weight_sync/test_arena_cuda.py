"""GPU memory that cannot be shared is refused with the allocator's setting named. On a machine with a GPU for real;
elsewhere the driver's answer is played."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vime.weight_sync import arena_cuda
from vime.weight_sync.arena import ArenaError

EXPORT = """
import json, torch
from vime.weight_sync.arena import ArenaError, arena_of
parameter = torch.zeros(8 << 20, device="cuda")
try:
    print(json.dumps(arena_of(parameter)[0].describe()))
except ArenaError as error:
    print(error)
"""


class Answer(int):
    """An error code of the driver, which has a name."""

    name = "cudaErrorInvalidValue"


def test_memory_without_an_ipc_handle_names_the_allocators_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(CUdeviceptr=int, cuMemGetAddressRange=lambda address: (Answer(0), address, 1 << 21))
    runtime = SimpleNamespace(cudaIpcGetMemHandle=lambda base: (Answer(1), None))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver, runtime=runtime))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with pytest.raises(ArenaError, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False") as caught:
        arena_cuda.CudaArena(torch.zeros(64, dtype=torch.uint8)).describe()
    assert "64 bytes of GPU memory cannot be shared with the engine (cudaErrorInvalidValue)" in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("expandable", [True, False])
def test_memory_of_expandable_segments_cannot_be_exported(expandable: bool) -> None:
    setting = f"expandable_segments:{expandable}"
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    root = Path(arena_cuda.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", EXPORT], env=env, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in done.stdout) == expandable, done.stdout
    assert ('"kind": "cuda_ipc"' in done.stdout) != expandable
