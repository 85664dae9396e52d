from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from vime.config import CheckpointOptions, Config, ObserveOptions, RolloutOptions
from vime.errors import ConfigError
from vime.observe import tracker as tracker_module
from vime.observe.journal import Journal, read_rows
from vime.observe.tracker import Tracker
from vime.types import Sample


def make_config(run_dir: Path | None, **observe) -> Config:
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="model"),
        rollout=RolloutOptions(num_rollout=4, rollout_batch_size=2, n_samples_per_prompt=2),
        observe=ObserveOptions(run_dir=str(run_dir) if run_dir else None, no_progress=True, **observe),
    )


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {"rollout/reward_mean": step / 7, "train/loss": -step / 3})
        tracker.samples(step, [sample(step, group, answer) for group in range(2) for answer in range(2)])


def sample(step: int, group: int, answer: int) -> Sample:
    return Sample(index=step * 4 + group * 2 + answer, group_index=step * 2 + group, prompt="1+1=", prompt_tokens=[1])


def test_rows_are_on_disk_at_once_and_merge_within_a_step(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path))
    tracker.log(0, {"eval/sums/reward_mean": 0.25})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/sums/reward_mean": 0.25}]
    tracker.log(0, {"train/loss": 0.1 + 0.2})
    tracker.log(1, {"train/loss": 3})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 0, "eval/sums/reward_mean": 0.25, "train/loss": 0.1 + 0.2}, {"step": 1, "train/loss": 3}]
    with pytest.raises(ValueError, match="step 0 comes after step 1"):
        tracker.log(0, {})
    tracker.close()
    tracker.close()


def test_phases_add_up_nest_and_reach_the_trace(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path))
    with tracker.phase("rollout", total=2, unit="answers") as line:
        line.update()
        with tracker.phase("reward"):
            pass
    with tracker.phase("rollout"):
        pass
    tracker.log(0, {})
    with pytest.raises(RuntimeError), tracker.phase("save"):
        raise RuntimeError
    tracker.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert set(row) == {"step", "time/rollout", "time/rollout/reward", "time/save"}
    assert row["time/rollout"] >= row["time/rollout/reward"] > 0
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["reward", "rollout", "rollout", "save"]
    assert events[1]["ts"] <= events[0]["ts"]
    assert events[0]["ts"] + events[0]["dur"] <= events[1]["ts"] + events[1]["dur"] + 1


def test_concurrent_tasks_do_not_nest_in_each_other(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path))

    async def part(name: str, entered: asyncio.Event, other: asyncio.Event) -> None:
        with tracker.phase(name):
            entered.set()
            await other.wait()

    async def both() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(part("a", a, b), part("b", b, a))

    asyncio.run(both())
    tracker.log(0, {})
    tracker.close()
    assert set(read_rows(tmp_path / "metrics.jsonl")[0]) == {"step", "time/a", "time/b"}


@pytest.mark.parametrize("torn", [b'{"step": 4, "rollout/rew', b'{"step": 4}', b"\x00\x00\x00\n"])
def test_continued_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path, torn: bytes) -> None:
    whole = Tracker(make_config(tmp_path / "whole"))
    log_steps(whole, range(6))
    whole.close()

    broken = Tracker(make_config(tmp_path / "broken"))
    log_steps(broken, range(4))
    for name in ("metrics.jsonl", "samples.jsonl"):  # the process died while it wrote the next row; its last checkpoint
        with (tmp_path / "broken" / name).open("ab") as file:  # is of step 2
            file.write(torn)
    continued = Tracker(make_config(tmp_path / "broken"), next_step=2)
    log_steps(continued, range(2, 6))
    continued.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "broken" / "trace.json").read_text()) == []


def test_fresh_run_keeps_what_lies_in_the_directory(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        tracker = Tracker(make_config(tmp_path))
        tracker.log(0, {"train/loss": value})
        tracker.close()
    losses = [read_rows(tmp_path / name)[0]["train/loss"] for name in ("metrics.jsonl.1", "metrics.jsonl.2")]
    assert losses == [1, 2]
    assert read_rows(tmp_path / "metrics.jsonl")[0]["train/loss"] == 3


def test_killed_process_leaves_every_row_it_returned_from(tmp_path: Path) -> None:
    """Kill -9 right after log() returned: row, sample and trace of that step are there."""
    script = f"""
        import os, signal
        from pathlib import Path
        from tests.unit.observe.test_tracker import log_steps, make_config
        from vime.observe.tracker import Tracker
        tracker = Tracker(make_config(Path({str(tmp_path)!r})))
        with tracker.phase("rollout"):
            pass
        log_steps(tracker, range(3))
        tracker.log(2, {{"eval/sums/reward_mean": 1}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["eval/sums/reward_mean"] == 1
    assert len(read_rows(tmp_path / "samples.jsonl")) == 12
    assert '"rollout"' in (tmp_path / "trace.json").read_text()


def test_journal_extends_only_the_last_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="no row"):
        journal.extend_last({"a": 1})
    journal.append({"step": 0, "text": "ü"}, {"step": 1, "a": "long value that is replaced by a short one"})
    journal.extend_last({"a": 1})
    journal.close()
    assert (tmp_path / "rows.jsonl").read_text() == '{"step": 0, "text": "ü"}\n{"step": 1, "a": 1}\n'
    journal = Journal(tmp_path / "rows.jsonl", next_step=9)
    journal.extend_last({"b": 2})
    journal.append({"step": 2})
    journal.close()
    assert read_rows(tmp_path / "rows.jsonl")[1:] == [{"step": 1, "a": 1, "b": 2}, {"step": 2}]


def test_numbers_that_json_has_no_word_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import numpy as np
    import torch

    tracker = Tracker(make_config(tmp_path))
    tracker.log(0, {"a": math.nan, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": np.int64(3), "e": None})
    tracker.log(1, {"a": math.inf})
    tracker.close()
    assert read_rows(tmp_path / "metrics.jsonl")[0] == {"step": 0, "a": None, "b": 0.5, "c": 2.0, "d": 3, "e": None}
    assert [record.message for record in caplog.records] == ["step 0: a is nan (null in metrics.jsonl; said once)"]


def test_samples_keep_whole_groups(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path, save_samples=1))
    odd = sample(0, 0, 1)
    odd.reward, odd.label, odd.response, odd.reward_info = math.nan, {1, 2}, "<script>", {"x": object()}
    tracker.samples(0, [sample(0, 0, 0), sample(0, 1, 0), odd], source="eval/sums")
    tracker.close()
    rows = read_rows(tmp_path / "samples.jsonl")
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[1]["reward"] == "nan"
    assert rows[1]["source"] == "eval/sums"
    assert rows[1]["label"] == "{1, 2}"


def test_tensorboard_has_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    tracker = Tracker(make_config(tmp_path / "run", use_tensorboard=True))
    log_steps(tracker, range(3))
    tracker.close()
    continued = Tracker(make_config(tmp_path / "run", use_tensorboard=True), next_step=1)
    log_steps(continued, range(1, 4))
    continued.close()
    events = EventAccumulator(str(tmp_path / "events"), purge_orphaned_data=True)
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("rollout/reward_mean")]
    assert [step for step, _ in points] == [0, 1, 2, 3]
    assert points[3][1] == pytest.approx(3 / 7, abs=1e-7)  # TensorBoard keeps float32
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert "tensorflow" not in sys.modules


def test_wandb_that_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--use-wandb: package wandb is not installed"):
        Tracker(make_config(tmp_path, use_wandb=True))


class FakeWandb(types.ModuleType):
    """What wandb 0.31 does with what it is given, as far as runs depend on it: no network is there to ask."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.rows: dict[str, list[dict[str, Any]]] = {}  # by run id
        self.axes: dict[str, str | None] = {}
        self.last = 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> FakeWandb:
        self.inits.append(options)
        self.rows.setdefault(options["id"], [])
        self.last = len(self.rows[options["id"]])
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        if step is not None and step < self.last:
            return  # "Steps must be monotonically increasing, so this data will be ignored"
        self.last = self.last + 1 if step is None else step
        self.rows[self.inits[-1]["id"]].append(row)

    def finish(self) -> None:
        pass


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_shows_what_a_continued_run_says_again(tmp_path: Path, wandb: FakeWandb) -> None:
    first = Tracker(make_config(tmp_path / "a" / "run", use_wandb=True))
    log_steps(first, range(5))
    first.close()
    continued = Tracker(make_config(tmp_path / "a" / "run", use_wandb=True), next_step=2)
    log_steps(continued, range(2, 6))
    continued.close()
    assert [options["resume"] for options in wandb.inits] == ["allow"] * 2
    assert wandb.axes["*"] == "step"
    (rows,) = wandb.rows.values()  # both went to one run
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert rows[5]["train/loss"] == -2 / 3


def test_wandb_tells_directories_of_one_name_apart(tmp_path: Path, wandb: FakeWandb) -> None:
    for folder in ("a", "b", "a"):  # the third is a fresh run in the first one's directory
        tracker = Tracker(make_config(tmp_path / folder / "run", use_wandb=True))
        log_steps(tracker, range(1))
        tracker.close()
    assert len(wandb.rows) == 3
    assert {options["name"] for options in wandb.inits} == {"run"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rm-url", "http://u:hunter2@host"], {"x_disable_meta": True}),
        (["--vllm-hf-token", "hunter2"], {"x_disable_meta": True}),
        (["--vllm_hf_token", "hunter2"], {"x_disable_meta": True}),  # the spelling that flags of engines may have
        (["--vllm-model-loader-extra-config", '{"token":"hunter2"}'], {"x_disable_meta": True}),
        (["--rm-url", "http://host", "--reward-key", "score", "--vllm-hf-overrides", '{"a":1}'], None),
    ],
)
def test_wandb_is_not_told_secrets(
    words: list[str], told: Any, tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends the command line, among what it knows about the machine."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    config = make_config(tmp_path, use_wandb=True)
    config.reward.rm_url, config.rollout.vllm = "http://u:hunter2@host", {"hf-token": "hunter2"}
    Tracker(config).close()
    assert "hunter2" not in str(wandb.inits)
    assert wandb.inits[0]["settings"] == told


def test_run_dir_by_default_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = [Tracker(make_config(None)) for _ in range(3)]
    assert len({tracker.run_dir for tracker in trackers}) == 3
    assert {tracker.run_dir.parent for tracker in trackers} == {Path("runs")}


def test_run_dir_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--run-dir .*file/run: cannot be written \(Not a directory\)"):
        Tracker(make_config(tmp_path / "file" / "run"))


def test_config_json_has_all_options_but_no_secret(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.rollout.vllm = {"hf-token": "hunter2", "max-model-len": "512", "max-num-batched-tokens": "64"}
    config.reward.rm_url = "http://user:hunter2@host/score?token=hunter2"
    config.reward.reward_key = "score"
    Tracker(config).close()
    text = (tmp_path / "config.json").read_text()
    assert "hunter2" not in text
    rollout, reward = json.loads(text)["rollout"], json.loads(text)["reward"]
    assert rollout["vllm"] == {"hf-token": "***", "max-model-len": "512", "max-num-batched-tokens": "64"}
    assert reward["rm_url"] == "http://***@host/score?token=***"
    assert reward["reward_key"] == "score"
    assert json.loads(text)["algorithm"]["eps_clip"] == 0.2
    assert config.rollout.vllm["hf-token"] == "hunter2"  # only the copy is blanked


def test_table_and_step_line(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path))
    assert tracker.table() == "nothing was logged"
    for step, reward in enumerate((0.2, 0.9, 0.5)):
        with tracker.phase("train"):
            pass
        tracker.log(step, {"rollout/reward_mean": reward, "train/logprob_abs_diff": 1e-7})
    tracker.log(0 + 3, {"eval/sums/reward_mean": 0.75})
    text = tracker.table()
    assert [line.split() for line in text.splitlines()][2] == ["reward", "0.200", "0.500", "0.900", "(step", "1)"]
    assert "sums" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("train ", "all"))] == ["train", "all"]
    line = tracker_module.headline(1, 4, {"rollout/reward_mean": 0.5, "time/train": 2.0, "time/train/loss": 1.0})
    assert line == "step 1/4 · reward 0.500 · 2.0 s"
    assert tracker_module.headline(1, 4, {"time/train": 2.0}) == ""
