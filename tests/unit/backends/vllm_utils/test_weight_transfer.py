"""Real vLLM workers, synced by plan and by buckets: equal to each other, to vLLM's own loading, and to transformers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine import TinyEngine

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
    assert len(out["state"]) == tp
    for state in out["state"]:
        assert state["problems"] == {}
        assert state["unused"] == []
        assert state["unwritten"] == {}
        assert state["copies"] > 0
    for claim in (
        *("greedy a", "greedy b by plan", "greedy b by buckets", "greedy a again"),
        *("planned equals bucketed", "as vLLM loaded it", "in step"),
    ):
        assert out[claim] is True, claim
    assert out["changed"] > 10
    for failure in out["failures"]:
        assert failure["phase"] == "update"
        assert "Attempted to load weight" in failure["cause"]
    assert out["versions"] == [4] * tp


def test_traffic_during_syncs_is_answered_from_one_version_each(engine: TinyEngine, tmp_path: Path) -> None:
    """Requests come all the time while two sets of weights alternate: none fails, none waits for ever, and every answer
    is the greedy one of the version that it says it is from."""
    from tests.tiny import make_checkpoint
    from tests.unit.backends.vllm_utils.one_rank import OneRank
    from vime.backends.vllm_utils.client import AsyncEngineClient, SamplingParams

    trainer = OneRank(engine, check_weight_update="full")
    checkpoints = [engine.checkpoint, make_checkpoint(tmp_path, seed=7)]
    trainer.load(checkpoints[0])
    trainer.connect()
    trainer.update.update_weights(100)
    prompts = [[1, 5, 9, 13], [300, 200, 100], [7] * 20]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers: list[tuple[int, list[int], list[int]]] = []
    ended = threading.Event()

    async def traffic() -> None:
        async with AsyncEngineClient(engine.url) as client:

            async def ask(number: int) -> None:
                count = 0
                while not ended.is_set():
                    found = await client.generate(
                        prompts[number % 3], sampling, f"traffic-{number}-{count}", timeout=60
                    )
                    answers.append((number % 3, found.token_ids, found.weight_versions))
                    count += 1

            await asyncio.gather(*(ask(number) for number in range(6)))

    requests = threading.Thread(target=lambda: failures.append(asyncio.run(traffic())))
    failures: list[Any] = []
    requests.start()
    for version in range(101, 131):
        trainer.load(checkpoints[version % 2])
        trainer.update.update_weights(version)
    ended.set()
    requests.join(120)
    assert failures == [None]  # it came to its end without an exception
    trainer.load(checkpoints[0])
    trainer.update.update_weights(132)

    seen: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for prompt, tokens, versions in answers:
        assert len(versions) == 1, versions
        seen.setdefault((prompt, versions[0] % 2), set()).add(tuple(tokens))
    assert len(answers) > 60
    assert len({versions[0] for _, _, versions in answers}) > 10
    for prompt in range(3):
        assert len(seen[prompt, 0]) == 1
        assert len(seen[prompt, 1]) == 1
        assert seen[prompt, 0] != seen[prompt, 1]
