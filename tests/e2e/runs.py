"""Whole runs of ``python train.py`` as child processes: real Ray, Megatron and vLLM on tiny models."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.listening import exposed
from tests.tiny import make_checkpoint
from vime.backends.vllm_utils.processes import living

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.5  # between looks at the sockets of a run
RUN_SECONDS = 400.0  # a run of three steps takes 40 s when nothing else runs


def parity_reward(config: Any, sample: Any) -> float:
    """A reward that depends on the answer's tokens alone and differs within a group: the share of even token ids."""
    tokens = sample.response_tokens
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def make_inputs(folder: Path, family: str = "qwen3", **checkpoint: Any) -> dict[str, str]:
    """A tiny checkpoint and 16 prompts; the flags that name them."""
    model = make_checkpoint(folder / family, family, num_hidden_layers=4, **checkpoint)
    return {"hf-checkpoint": model, "prompt-data": make_prompts(folder)}


def make_prompts(folder: Path) -> str:
    prompts = folder / "prompts.jsonl"
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randrange(100)} + {rng.randrange(100)} =", "label": "1"} for _ in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(prompts)


SMALL: dict[str, Any] = {
    "input-key": "prompt",
    "label-key": "label",
    "apply-chat-template": True,
    "custom-rm-path": "tests.e2e.runs.parity_reward",
    "colocate": True,
    "num-rollout": 3,
    "rollout-batch-size": 4,
    "n-samples-per-prompt": 4,
    "rollout-max-response-len": 12,
    "lr": "1e-3",
    "use-kl-loss": True,
    "kl-loss-coef": "0.1",
    "kl-loss-type": "low_var_kl",
    "entropy-coef": "0.01",
    "no-progress": True,
}


def as_flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return flags


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    output: str
    run_dir: Path
    exposed: list[str]  # what listened where another machine could have reached it, in words

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, one per step."""
        return read_rows(self.run_dir)

    def results(self) -> list[dict[str, Any]]:
        """What a run computes: the rows without seconds and what follows from them."""
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "sync/"))} for row in self.rows]


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class Running:
    """A run in progress, for tests that do something to it."""

    def __init__(
        self, flags: list[str], run_dir: Path, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> None:
        self.run_dir = run_dir
        self.exposed: set[str] = set()
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(run_dir.with_suffix(".out"), "w+")  # noqa: SIM115 - closed by finish()
        self.process = subprocess.Popen(
            [*before, sys.executable, "train.py", *flags, "--run-dir", str(run_dir)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def children(self, *words: str) -> list[psutil.Process]:
        """Living processes of the run whose command line holds one of ``words``; all of them without."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            if not words or any(word in line for word in words):
                found.append(child)
        return found

    def until(self, condition: Callable[[], Any], what: str, seconds: float = RUN_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s:\n{self.output()}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(row["step"] >= step for row in read_rows(self.run_dir)), f"step {step}")

    def output(self) -> str:
        return self.run_dir.with_suffix(".out").read_text()[-6000:]

    def finish(self, seconds: float = RUN_SECONDS) -> Finished:
        """Wait for its end, and look meanwhile what it lets others reach."""
        deadline = time.monotonic() + seconds
        while (code := self._ended(LOOK_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the run did not end within {seconds:.0f} s:\n{self.output()}")
            with suppress(psutil.NoSuchProcess):
                self.exposed |= set(exposed(psutil.Process(self.process.pid)))
        self._log.close()
        return Finished(code, self.run_dir.with_suffix(".out").read_text(), self.run_dir, sorted(self.exposed))

    def _ended(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def running(
    options: Mapping[str, Any], run_dir: Path, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[Running]:
    run = Running(as_flags(options), run_dir, env, before)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def complete(
    options: Mapping[str, Any], run_dir: Path, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Finished:
    """Run to the end; it must succeed, and nothing of it may listen where another machine could reach it."""
    with running(options, run_dir, env, before) as run:
        done = run.finish()
    assert done.code == 0, done.output[-6000:]
    assert done.exposed == []
    return done


class Traces:
    """What a run has on this machine while it lives, to see that all of it goes."""

    def __init__(self, run: Running) -> None:
        self.processes = run.children()
        self.files: set[str] = set()
        for process in self.processes:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                line = " ".join(process.cmdline())
            except (OSError, psutil.NoSuchProcess):
                continue
            self.files |= {
                part.split()[5] for part in maps.splitlines() if " /dev/shm/" in part and "deleted" not in part
            }
            self.files |= {v[7:].decode() for v in environment if v.startswith(b"TMPDIR=") and b"vime-" in v}
            self.files |= {word for word in line.replace("=", " ").split() if word.startswith("/tmp/vime-")}
        assert self.processes
        assert any("/tmp/vime-" in file for file in self.files)

    def expect_gone(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self._left():
            assert time.monotonic() < deadline, f"left behind after {seconds:.0f} s: {left}"
            time.sleep(0.1)

    def _left(self) -> list[str]:
        alive = []
        for process in self.processes:
            try:
                if living(process):
                    alive.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.NoSuchProcess:
                continue
        return alive + [file for file in sorted(self.files) if os.path.exists(file)]
