"""Real shared memory between real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vime.weight_sync import arena as arena_module
from vime.weight_sync.arena import (
    ArenaError,
    Stamp,
    allocate,
    arena_of,
    create_arena,
    free_memory,
    node_name,
    open_arena,
    sealed,
)

READER = """
import json, sys
from vime.weight_sync.arena import open_arena
tensor = open_arena(json.loads(sys.stdin.readline()))
print(tensor.numel(), tensor[:4].tolist(), flush=True)
sys.stdin.readline()  # told that the writer has changed something, or has died
print(tensor[:4].tolist(), flush=True)
try:
    open_arena(json.loads(sys.stdin.readline()))
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""

WRITER = """
import json, sys, os
from vime.weight_sync.arena import create_arena
arena = create_arena(5000)
arena.tensor[:4] = 7
print(json.dumps(arena.describe()), flush=True)
sys.stdin.readline()
"""


def spawn(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_another_process_sees_what_is_written_later() -> None:
    arena = create_arena(5000)
    arena.tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    reader = spawn(READER)
    handle = arena.describe()
    assert ask(reader, json.dumps(handle)) == "8192 [1, 2, 3, 4]"
    arena.tensor[:4] = 9
    assert ask(reader, "changed") == "[9, 9, 9, 9]"
    arena.close()
    assert ask(reader, json.dumps(handle)).startswith("ArenaError cannot open")
    reader.wait(10)


def test_kill_9_leaves_nothing_and_a_reader_keeps_what_it_has_mapped() -> None:
    writer, reader = spawn(WRITER), spawn(READER)
    assert writer.stdout is not None
    handle = writer.stdout.readline().strip()
    assert ask(reader, handle) == "8192 [7, 7, 7, 7]"
    fd = json.loads(handle)["fd"]
    assert os.readlink(f"/proc/{writer.pid}/fd/{fd}").startswith("/memfd:")  # goes with whoever maps it last
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    assert ask(reader, "died") == "[7, 7, 7, 7]"
    assert "must be alive" in ask(reader, handle)
    reader.wait(10)


def test_a_recycled_descriptor_is_noticed() -> None:
    arena = create_arena(1)
    handle = arena.describe()
    assert open_arena(handle).numel() == 4096
    with pytest.raises(ArenaError, match="no longer the arena it was"):
        open_arena(sealed(handle | {"inode": handle["inode"] + 1}))
    with pytest.raises(ArenaError, match="unknown kind 'cuda'"):
        open_arena(sealed({"kind": "cuda"}))
    arena.close()


@pytest.mark.parametrize("key", ["kind", "pid", "fd", "inode", "bytes", "checksum"])
def test_a_handle_that_changes_on_its_way_is_refused(key: str) -> None:
    arena = create_arena(1)
    handle = json.loads(json.dumps(arena.describe()))
    assert open_arena(handle).numel() == 4096
    value = handle[key]
    with pytest.raises(ArenaError, match=r"has changed on its way: its checksum is [0-9a-f]{16}, it says "):
        open_arena(handle | {key: value + 1 if isinstance(value, int) else f"{value}0"})
    with pytest.raises(ArenaError, match="has changed on its way"):
        open_arena({other: handle[other] for other in handle if other != key})
    arena.close()


def test_too_little_memory_is_said_in_words_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArenaError, match=r"1024\.00 GiB of shared memory are needed for the weights, .* GiB are free"):
        create_arena(1 << 40)
    # The check says there is room, the kernel says there is not (somebody else was faster).
    monkeypatch.setattr(arena_module, "free_memory", lambda: 1 << 62)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArenaError, match="No space left on device"):
        create_arena(1 << 20)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_free_memory_is_plausible() -> None:
    assert 1 << 20 < free_memory() < 1 << 50


def test_the_arena_of_a_parameter_and_of_private_memory() -> None:
    flat = allocate(1 << 16)
    view = flat.view(torch.float32)[128:1024].view(28, 32)
    arena, offset = arena_of(torch.nn.Parameter(view[1:]))
    assert offset == (128 + 32) * 4
    assert arena.tensor.data_ptr() == flat.data_ptr()
    with pytest.raises(ArenaError, match="private memory"):
        arena_of(torch.zeros(3))
    arena.close()


def test_stamp() -> None:
    stamp = Stamp()
    page = open_arena(stamp.arena.describe())
    assert Stamp.read(page) == Stamp.WRITING
    stamp.set(17)
    assert Stamp.read(page) == 17
    stamp.arena.close()


def test_nodes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that were cloned differ in nothing but when they started."""
    here = node_name()
    assert here == node_name()
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a: "another\n" if self.name == "boot_id" else read(self, *a))
    assert node_name() != here
