"""Real vLLM engines on tiny checkpoints for tests, and ways to see what they leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.tiny import make_checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.command import EngineCommand, engine_command
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.processes import living
from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions
from vime.models.spec import ModelSpec, spec_from_hf

START_TIMEOUT = 240.0  # seconds; 15 when nothing else runs


@dataclass
class TinyEngine:
    """A running engine with what a test wants to know about it."""

    process: EngineProcess
    client: EngineClient
    checkpoint: str
    config: Config
    spec: ModelSpec

    @property
    def url(self) -> str:
        return self.process.url


def tiny_config(checkpoint: str, tensor_parallel: int = 1, **rollout: Any) -> Config:
    options: dict[str, Any] = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "rollout_max_context_len": 2048}
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint=checkpoint),
        rollout=RolloutOptions(**(options | rollout)),
        cluster=ClusterOptions(
            rollout_num_gpus=tensor_parallel,
            rollout_num_gpus_per_engine=tensor_parallel,
            actor_num_gpus_per_node=tensor_parallel,
        ),
    )


def tiny_command(checkpoint: str, tensor_parallel: int = 1, index: int = 0, **rollout: Any) -> EngineCommand:
    config = tiny_config(checkpoint, tensor_parallel, **rollout)
    return engine_command(config, spec_from_hf(checkpoint), index, device="cpu")


def start_engine(folder: Path, tensor_parallel: int = 1, family: str = "qwen3", **checkpoint: Any) -> TinyEngine:
    """Start an engine on a fresh tiny checkpoint below ``folder`` and wait until it serves. The caller ends it."""
    path = make_checkpoint(folder / "checkpoint", family, **checkpoint)
    process = EngineProcess(tiny_command(path, tensor_parallel), folder / "engine.log")
    process.start()
    try:
        process.wait_ready(START_TIMEOUT)
    except BaseException:
        process.terminate(grace=0)
        raise
    client = EngineClient(process.url, timeout=60)
    return TinyEngine(process, client, path, tiny_config(path, tensor_parallel), spec_from_hf(path))


def eventually(condition: Callable[[], bool], timeout: float = 60.0, what: str = "") -> None:
    """Wait for something that happens in other processes; fail when it has not within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.02)


class Leftovers:
    """What an engine has on this machine, to see that all of it goes. Made while the engine runs.

    Segments are told apart from those of other engines by who maps them, scratch directories by the environment.
    """

    def __init__(self, pids: list[int]) -> None:
        self.processes = [psutil.Process(pid) for pid in pids]
        self.directories: set[str] = set()
        inodes: set[int] = set()
        for pid in pids:
            maps = Path(f"/proc/{pid}/maps").read_text()
            inodes |= {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            self.directories |= {
                v[7:].decode() for v in environment if v.startswith(b"TMPDIR=/") and b"vime-engine" in v
            }
        self.segments = {str(path) for path in Path("/dev/shm").iterdir() if path.lstat().st_ino in inodes}

    def remaining(self) -> list[str]:
        alive = [f"{p.pid} {p.name()}" for p in self.processes if living(p)]
        return alive + [path for path in sorted(self.segments | self.directories) if os.path.exists(path)]

    def expect_none(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while left := self.remaining():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
