"""Real vLLM workers, synced by plan and by buckets: equal to each other, to vLLM's own loading, and to transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = [
    pytest.param("qwen3", "tied", 1, id="dense-tied"),
    pytest.param("qwen3", "untied", 2, id="dense-untied-tp2"),
    pytest.param("qwen3_moe", "untied", 1, id="moe"),
    pytest.param("qwen3_moe", "untied", 2, id="moe-tp2", marks=pytest.mark.slow),
    pytest.param("qwen2", "tied", 1, id="dense-tied-biases"),
    pytest.param("llama", "untied", 1, id="llama", marks=pytest.mark.slow),
]


def run(family: str, tied: str, tp: int, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tests.unit.backends.vllm_utils.offline_engine",
        family,
        tied,
        str(tp),
        str(folder),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    results = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, ended.stdout[-3000:] + ended.stderr[-6000:]
    return json.loads(results[0].removeprefix("RESULT "))


@pytest.mark.parametrize(("family", "tied", "tp"), CASES)
def test_both_paths_leave_what_vllm_itself_would_have_loaded(tmp_path: Path, family: str, tied: str, tp: int) -> None:
    out = run(family, tied, tp, tmp_path)
    assert (out["accepted without"], out["other failures"]) == ([], [])  # each tensor in turn was not the trainer's
    assert len(out["state"]) == tp
    for state in out["state"]:
        assert state["problems"] == {}
        assert state["unused"] == []
        assert state["unwritten"] == {}
        assert state["copies"] > 0
    for claim in (
        *("greedy a", "greedy b by plan", "greedy b by buckets", "greedy a again"),
        *("planned equals bucketed", "as vLLM loaded it", "in step", "greedy a alone"),
    ):
        assert out[claim] is True, claim
    assert out["changed"] > 10
    for failure in out["failures"]:
        assert failure["phase"] == "update"
        assert "tensors did not come, the first " in failure["cause"]
    for failure in out["changed failures"]:
        assert failure["phase"] == "checksum"
        assert "model.norm.weight arrived changed" in failure["cause"]
    assert out["versions"] == [4] * tp
    assert out["left"] == [None] * tp
