from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.conftest import Problems
from tests.unit.config.runs import write_checkpoint, write_prompts, write_weights
from vime.backends.megatron_utils.checkpoint_directory import CheckpointDirectory
from vime.config.check_files import function_problem
from vime.models.layout import checkpoint_tensors
from vime.models.spec import spec_from_hf


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint of its own for a test to break."""
    return Path(write_checkpoint(tmp_path / "model"))


def test_a_name_on_the_hub(problems: Problems) -> None:
    said = problems("--hf-checkpoint Qwen/Qwen3-0.6B")
    assert said == [
        "--hf-checkpoint Qwen/Qwen3-0.6B: no such directory; vime reads local directories: "
        "if this is a model's name at Hugging Face, `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, "
        "then --hf-checkpoint Qwen3-0.6B"
    ]


def test_a_model_that_is_not_implemented(problems: Problems, broken: Path) -> None:
    write_checkpoint(broken, model_type="gpt2")
    (said,) = problems(f"--hf-checkpoint {broken}")
    assert said.startswith(f"--hf-checkpoint {broken}: ")
    assert "'gpt2'" in said


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


_TWO = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


# file and content -> what is said
TEXTS = [
    (("tokenizer.json", "{"), "tokenizer.json is not valid JSON"),
    (("tokenizer.json", json.dumps({"model": {"vocab": ["x"] * 513}})), "has 513 tokens, but config.json says"),
    (("tokenizer_config.json", "[]"), "tokenizer_config.json holds a list"),
    (("chat_template.jinja", "{% for x in %}"), "chat_template.jinja:1 is no Jinja template"),
    (("model.safetensors", "\2" + "\0" * 7 + "{}"), "have no tensor model.embed_tokens"),
    (("model.safetensors", "\0\0\1" + "\0" * 5 + "[" * 65536), "is not a safetensors file"),
]


def _write(folder: Path, text: tuple[str, str]) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / text[0]).write_text(text[1])


def _weights(folder: Path, **shape: int) -> None:
    """The weights of another shape than config.json's."""
    other = spec_from_hf(folder).replace(moe_layers=(), **shape)
    write_weights(folder / "model.safetensors", checkpoint_tensors(other))


def _index(folder: Path, names: Any = _TWO) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json in it; this is no Hugging Face model"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in it (tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "--apply-chat-template: "),
        (lambda f: (f / "model.safetensors").unlink(), "no weights in it (model.safetensors or"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
        (lambda f: _cut(f / "model.safetensors"), "download it again"),
        (lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs"), "is a git-lfs pointer"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "is cut off: 0 bytes"),
        *((lambda f, text=text: _write(f, text), problem) for text, problem in TEXTS),
        (lambda f: _weights(f, num_layers=1), "have no tensor model.layers.1.input_layernorm.weight"),
        (lambda f: _weights(f, num_layers=3), "have 3 layers, but its config.json says num_hidden_layers 2"),
        (lambda f: _weights(f, hidden_size=128), "embed_tokens.weight has shape [512, 128], but its config.json"),
        *((lambda f, names=names: _index(f, names), "safetensors.index.json") for names in ([], {}, {"a": 1})),
        (_index, "1 of 2 weight files are missing, first model-00002-of-00002.safetensors"),
    ],
)
def test_a_damaged_checkpoint(problems: Problems, broken: Path, damage, problem: str) -> None:  # type: ignore[no-untyped-def]
    damage(broken)
    (said,) = problems(f"--hf-checkpoint {broken}")
    assert problem in said
    assert str(broken) in said


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load", "--load", "--save", "--save-hf", "--run-dir"])
def test_a_path_that_no_system_takes(problems: Problems, flag: str) -> None:
    said = problems(words=[flag, "/tmp/" + "x" * 5000])
    assert any("File name too long" in problem for problem in said)


def test_a_path_that_no_system_takes_goes_by_its_flag(problems: Problems) -> None:
    words = ["--update-weight-transport", "disk", "--update-weight-disk-dir", "/tmp/" + "x" * 300]
    assert f"{words[2]} {words[3]}: File name too long" in problems(words=words)


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load", "--load"])
def test_a_file_where_a_directory_belongs(problems: Problems, prompts: str, flag: str) -> None:
    (said,) = problems(f"{flag} {prompts}")
    assert said.startswith(f"{flag} {prompts}: ")


def test_reference(problems: Problems, broken: Path, tmp_path: Path) -> None:
    (said,) = problems(f"--ref-load {tmp_path / 'none'}")
    assert said == f"--ref-load {tmp_path / 'none'}: no such directory"
    (tmp_path / "empty").mkdir()
    (said,) = problems(f"--ref-load {tmp_path / 'empty'}")
    assert "neither a Hugging Face directory (no config.json) nor a Megatron torch_dist checkpoint" in said
    write_checkpoint(broken, num_hidden_layers=3)
    (said,) = problems(f"--ref-load {broken}")
    assert said.startswith(f"--ref-load {broken} has num_layers 3, but --hf-checkpoint")


def test_reference_as_torch_dist(problems: Problems, tmp_path: Path) -> None:
    with CheckpointDirectory(tmp_path / "ref").writing(1) as folder:
        (folder / "metadata.json").write_text("{}")
    assert problems(f"--ref-load {tmp_path / 'ref'}") == []
    assert problems(f"--ref-load {tmp_path / 'ref' / 'iter_0000001'}") == []
    (tmp_path / "converted" / "release").mkdir(parents=True)
    (tmp_path / "converted" / "release" / "metadata.json").write_text("{}")
    assert problems(f"--ref-load {tmp_path / 'converted'}") == []


@pytest.mark.parametrize("there", [False, True])
def test_load_from_nothing_is_a_fresh_start(problems: Problems, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "run" / "iter_0000001.tmp").mkdir(parents=True)  # an interrupted first save
    assert problems(f"--save {tmp_path / 'run'} --load {tmp_path / 'other' / '..' / 'run'}/") == []


@pytest.mark.parametrize("save", ["other", None])
def test_load_from_nothing_that_nothing_will_be_saved_in(problems: Problems, tmp_path: Path, save: str | None) -> None:
    given = f"--save {tmp_path / save}" if save else ""
    (said,) = problems(f"{given} --load {tmp_path / 'mistyped'}")
    assert said.startswith(f"--load {tmp_path / 'mistyped'}: no such directory")


def test_load_from_something_else(problems: Problems, dense: str, tmp_path: Path) -> None:
    (said,) = problems(f"--load {dense}")
    assert "the weights to start from are --hf-checkpoint's" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    (said,) = problems(f"--load {tmp_path / 'other'}")
    assert "no checkpoint in it, but notes.txt" in said
    with CheckpointDirectory(tmp_path / "weights").writing(0) as folder:
        (folder / "metadata.json").write_text("{}")
    (said,) = problems(f"--load {tmp_path / 'weights'}")
    assert "iter_0000000 holds weights only (no rollout.json), not the state of a run" in said


def test_saving_over_another_run(problems: Problems, tmp_path: Path) -> None:
    with CheckpointDirectory(tmp_path / "run").writing(7) as folder:
        (folder / "metadata.json").write_text("{}")
        (folder / "rollout.json").write_text("{}")
    (said,) = problems(f"--save {tmp_path / 'run'}")
    assert "holds the checkpoint of another run after 7 rollouts, and this run starts at 0" in said
    assert problems(f"--load {tmp_path / 'run'}") == []


def test_places_that_cannot_be_written(problems: Problems, tmp_path: Path, dense: str) -> None:
    (tmp_path / "file").write_text("")
    assert problems(f"--save {tmp_path / 'file' / 'x'}") == [
        f"--save {tmp_path / 'file' / 'x'}: {tmp_path / 'file'} is not a directory"
    ]
    said, _ = problems(f"--save-hf {dense}", without=["--save"])  # it is --ref-load as well
    assert f"--save-hf {dense} would overwrite --hf-checkpoint" in said
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):  # root may write anywhere
        assert problems(f"--run-dir {locked / 'x'}", without=["--save-hf"]) == [
            f"--run-dir {locked / 'x'}: no permission to write in {locked}"
        ]


def test_the_first_bad_row(problems: Problems, tmp_path: Path) -> None:
    file = Path(write_prompts(tmp_path / "p.jsonl", 20))
    lines = file.read_text().splitlines()
    lines[12] = '{"prompt": "no label"}'
    file.write_text("\n".join(lines))
    (said,) = problems(f"--prompt-data {file}")
    assert said == f"--prompt-data {file}:13: no 'label' (--label-key); the row has prompt"
    assert problems(f"--prompt-data {file}@[:12]") == []


def test_prompt_files_that_are_not_there(problems: Problems, prompts: str) -> None:
    said = problems("--prompt-data none.jsonl --eval-interval 2", words=["--eval-prompt-data", "test", "gone.jsonl"])
    assert said == ["--prompt-data none.jsonl: no such file", "--eval-prompt-data test gone.jsonl: no such file"]


def test_evaluation_files(problems: Problems, prompts: str) -> None:
    pairs = ["--eval-prompt-data", "a", prompts, "a", prompts]
    (said,) = problems("--eval-interval 2", words=pairs)
    assert "the name a stands twice" in said


def test_fewer_prompts_than_a_rollout(problems: Problems, prompts: str) -> None:
    assert problems(f"--num-epoch 2 --prompt-data {prompts}@[:1]", without=["--num-rollout"]) == [
        "--num-epoch 2 over 1 prompts is less than one rollout (--rollout-batch-size 4)"
    ]


def test_functions_are_looked_for_without_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "score.py").write_text(
        "raise RuntimeError('imported')\ndef right(config, sample): ...\nasync def slow(): ...\n"
    )
    (package / "typo.py").write_text("def (\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert function_problem("my_rewards_pkg.score.right") is None
    assert function_problem("my_rewards_pkg.score.slow") is None
    assert function_problem("json.loads") is None
    assert function_problem("score") == "must be module.function, as in my_package.rewards.score"
    assert function_problem("my_rewards_pkg.score.write") == (
        f"{package / 'score.py'} defines no 'write'; did you mean right?"
    )
    assert function_problem("my_rewards_pkg.scores.right") == (
        "no module 'my_rewards_pkg.scores' (no scores.py in my_rewards_pkg)"
    )
    assert "no module 'nowhere_at_all'" in str(function_problem("nowhere_at_all.f"))
    assert "typo.py:1 is not valid Python" in str(function_problem("my_rewards_pkg.typo.f"))
    shutil.rmtree(package)


def test_a_function_that_is_not_there(problems: Problems) -> None:
    (said,) = problems("--custom-rm-path json.load_all", without=["--rm-type"])
    assert said.startswith("--custom-rm-path json.load_all: ")
    assert "defines no 'load_all'" in said
