"""The example as `make quickstart` runs it, with so few steps that nothing is learned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_example_runs_from_nothing_to_its_report(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/arithmetic/run.py", "--out", tmp_path / "run", "--seed", "5"]
    command += ["--max", "30", "--unseen", "16", "--hidden-size", "64", "--layers", "1", "--warmup", "2", "--"]
    command += ["--num-rollout", "2", "--rollout-batch-size", "4", "--global-batch-size", "16", "--eval-interval", "1"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "mean reward on 16 unseen problems:" in done.stdout
    run = tmp_path / "run" / "grpo"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("eval/unseen/reward_mean" in row for row in rows)
    assert all(row["train/logprob_abs_diff"] <= 1e-5 for row in rows[:2])  # fp32 on both sides
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {row["source"] for row in samples} == {"train", "eval/unseen"}
    assert (run / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run" / "trained" / "config.json").exists()
