"""What a run finds out before it starts anything."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tests.unit.config.runs import write_prompts
from vime import run
from vime.config import Config
from vime.config.parse import parse
from vime.errors import DataError, VimeError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    flags = {
        "hf-checkpoint": make_checkpoint(tmp_path / "model"),
        "prompt-data": write_prompts(tmp_path / "prompts.jsonl"),
        "run-dir": str(tmp_path / "run"),
        **{"rollout-batch-size": "2", "num-rollout": "1", "n-samples-per-prompt": "2", "rm-type": "random"},
        "input-key": "prompt",
    }
    return parse([word for name, value in flags.items() for word in (f"--{name}", value)] + ["--apply-chat-template"])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr(run, "ray_runtime", start)


def refused(config: Config) -> str:
    with pytest.raises(VimeError) as caught, run.open_run(config):
        pass
    return str(caught.value)


def test_what_is_right_goes_on_to_ray(config: Config) -> None:
    with pytest.raises(AssertionError, match="Ray would"), run.open_run(config):
        pass


def test_a_function_that_cannot_be_imported(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_at_import.py").write_text("import no_such_package\n\ndef score(config, sample): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = dataclasses.replace(config.reward, rm_type=None, custom_rm_path="breaks_at_import.score")
    assert "importing breaks_at_import failed" in refused(dataclasses.replace(config, reward=reward))


def test_prompts_that_are_all_too_long(config: Config) -> None:
    data = dataclasses.replace(config.data, rollout_max_prompt_len=1)
    assert "every prompt is longer than 1 tokens" in refused(dataclasses.replace(config, data=data))


@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
def test_a_directory_that_another_run_writes_to(config: Config, tmp_path: Path, flag: str) -> None:
    checkpoint = dataclasses.replace(config.checkpoint, save=str(tmp_path / "save"))
    config = dataclasses.replace(config, checkpoint=checkpoint)
    folder = tmp_path / {"--run-dir": "run", "--save": "save"}[flag]
    folder.mkdir()
    code = (
        "import sys; from vime.files import claimed\nwith claimed(sys.argv[1], ''): print('mine', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        assert f"{flag} {folder}: another run (pid {other.pid}) is writing there" in refused(config)
        other.kill()
        other.wait()
    with pytest.raises(AssertionError, match="Ray would"), run.open_run(config):
        pass


def test_a_tokenizer_that_cannot_be_read(config: Config) -> None:
    (Path(config.checkpoint.hf_checkpoint) / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be read" in refused(config)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"prompts": {}}', '{"prompts": 3}'])
def test_a_checkpoint_without_the_place_reached(tmp_path: Path, state: str) -> None:
    (tmp_path / "rollout.json").write_text(state)
    with pytest.raises(DataError, match=r"rollout\.json"):
        run._rollout_state(tmp_path)


def test_the_place_reached(tmp_path: Path) -> None:
    state = {"prompts": {"drawn": 4}}
    (tmp_path / "rollout.json").write_text(json.dumps(state))
    assert run._rollout_state(tmp_path) == state
