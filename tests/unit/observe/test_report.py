from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.observe.test_tracker import make_config
from vime.errors import DataError
from vime.observe import report
from vime.observe.report import script_json, select_samples, shorten, write_report
from vime.observe.tracker import Tracker
from vime.types import Sample, Status

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> /*DATA*/ &lt; \u2028 ü ∑"


def make_run(run_dir: Path, steps: int = 40) -> Tracker:
    """A run as it looks in practice, through the real Tracker: noise, evaluations, a last row without training."""
    rng = random.Random(0)
    tracker = Tracker(make_config(run_dir, save_samples=4))
    for step in range(steps + 1):
        reward = 0.38 + 0.5 * (1 - math.exp(-step / 15))
        if step % 10 == 0:
            tracker.log(
                step, {"eval/unseen/reward_mean": reward, "eval/unseen/response_length_mean": 4.1, "time/eval": 1.5}
            )
        if step == steps:
            break
        answers = [make_answer(step, group, k, rng, reward) for group in range(4) for k in range(8)]
        tracker.samples(step, answers)
        tracker.log(
            step,
            {
                "rollout/reward_mean": reward + rng.gauss(0, 0.03),
                "rollout/response_length_mean": 3.9 + rng.gauss(0, 0.05),
                "rollout/truncated_fraction": 0.02 * math.exp(-step / 5),
                "rollout/zero_std_groups_fraction": 0.1 + reward / 4,
                "train/loss": rng.gauss(0, 0.02),
                "train/pg_loss": rng.gauss(0, 0.02),
                "train/kl": 1e-3 * step * (1 + rng.gauss(0, 0.1)),
                "train/entropy": 0.6 * math.exp(-step / 30),
                "train/grad_norm": 0.5 + rng.random() / 5,
                "train/lr": 1e-4,
                "train/clip_fraction": 0.0,
                "train/logprob_abs_diff": 4e-7 * (1 + rng.random()),
                "train/logprob_abs_diff_max": 6e-6 * (1 + rng.random()),
                "sync/seconds": 0.012 + rng.random() / 1000,
                "time/generate": 1.1 + rng.random() / 3,
                "time/train": 1.6 + rng.random() / 5,
                "time/train/log_probs": 0.4,
                "time/sync": 0.05,
            },
        )
    tracker.close()
    return tracker


def make_answer(step: int, group: int, k: int, rng: random.Random, level: float) -> Sample:
    a, b = rng.randrange(100), rng.randrange(100)
    right = rng.random() < level
    evil = group == 0 and k == 0
    return Sample(
        index=step * 32 + group * 8 + k,
        group_index=step * 4 + group,
        prompt=[{"role": "user", "content": EVIL if evil else f"{a}+{b}="}],
        prompt_tokens=[1, 2, 3],
        label=str(a + b),
        response=EVIL if evil else str(a + b if right else a + b + rng.choice((-10, -1, 1, 10))),
        response_tokens=[1, 2, 3],
        reward=1.0 if right else 0.0,
        status=Status.TRUNCATED if k == 7 and step == 0 else Status.COMPLETED,
        weight_versions=[step],
    )


class Scripts(HTMLParser):
    """Collects the elements of a page as a browser's parser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"type": "application/json", "id": "data"}):
            self.script += data


def test_page_is_self_contained_and_answers_stay_text(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    path = write_report(tmp_path / "run")
    page = path.read_text()
    parser = Scripts()
    parser.feed(page)
    assert [tag for tag, _ in parser.tags].count("script") == 2  # the data and the program, nothing from an answer
    assert "img" not in [tag for tag, _ in parser.tags]
    assert not [attrs for _, attrs in parser.tags if {"src", "href"} & set(attrs)]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|document\.write", page)
    assert not [url for url in re.findall(r"https?://[\w./]+", page) if url != "http://www.w3.org/2000/svg"]
    data = json.loads(parser.script)
    assert data["samples"][0]["response"] == EVIL  # nothing of it is lost either
    assert data["samples"][0]["prompt"] == f"user: {EVIL}"
    assert data["evals"] == ["unseen"]
    assert len(data["metrics"]["rollout/reward_mean"]) == 41
    assert data["metrics"]["rollout/reward_mean"][-1] is None
    assert "generate" in data["phases"][0]
    assert "train/log_probs" not in data["phases"][0]
    assert data["options"]["rollout"]["n_samples_per_prompt"] == 2
    assert data["tiles"][0]["value"] == "0.380 → 0.845"


def test_every_metric_the_page_draws_is_one_of_the_contract(tmp_path: Path) -> None:
    """A chart of a misspelt metric would be left out silently."""
    make_run(tmp_path / "run", steps=2)
    data = Scripts()
    data.feed(write_report(tmp_path / "run").read_text())
    metrics = json.loads(data.script)["metrics"]
    drawn = re.findall(r'metric: "([^"]+)"', (Path(report.__file__).parent / "report.js").read_text())
    assert len(drawn) >= 12
    assert set(drawn) <= set(metrics)


@pytest.mark.parametrize("content", [None, b"", b'{"step": 0, "train/lo'])
def test_directory_without_a_step_is_said(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl (is empty|does not exist): give the directory of a run"):
        write_report(tmp_path)


def test_killed_run_without_samples_or_options_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": null}\n{"step": 1, "train/lo')
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "resp')
    assert write_report(tmp_path).exists()


def test_rows_that_somebody_edited(tmp_path: Path) -> None:
    rows = '{"a": 1}\n{"step": 0, "train/loss": NaN, "b": Infinity}\n{"step": "x"}\n{"step": 1, "train/loss": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert '"steps": [0, 1]' in write_report(tmp_path).read_text()


def test_long_run_stays_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_SAMPLE_CHARACTERS", 60 * 500)
    rows = [
        {"step": step, "source": "train", "group": 0, "prompt": "p", "response": "x" * 60, "reward": 0.0}
        for step in range(1000)
        for _ in range(4)
    ]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = list(select_samples(path))
    steps = sorted({row["step"] for row in kept})
    assert len(steps) == report.MAX_SAMPLE_STEPS
    assert (steps[0], steps[-1]) == (0, 999)
    assert len(kept) == 60  # one of four answers of 261 characters fits into 500
    assert shorten("a" * 50 + "b" * 50, 20) == "a" * 10 + "\n… 80 characters left out …\n" + "b" * 10


def test_script_json_cannot_end_its_element() -> None:
    text = script_json({"a": EVIL})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": EVIL}
