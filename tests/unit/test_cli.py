from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.unit.config.runs import command_line, required_run, write_checkpoint, write_prompts
from vime import cli
from vime.config import Config
from vime.errors import DataError, TrainerError

HEAVY = ("torch", "transformers", "ray", "vllm", "megatron", "numpy", "tensorboard", "tokenizers")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = required_run(write_checkpoint(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    return [*command_line(run), "--device", "cpu"]


def start_training(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> list[Config]:
    """Put something in the place of the training loop, which starts Ray; returns what it was called with."""
    called: list[Config] = []

    def train(config: Config) -> None:
        called.append(config)
        if error is not None:
            raise error

    module = types.ModuleType("vime.controller")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vime.controller", module)
    monkeypatch.setattr("vime.cluster.process.start_of_process", lambda existing_ray: None)
    return called


@pytest.mark.parametrize(
    "argv", [["check"], ["--help"], ["train", "--help-all"], ["check", "--vllm-max-num-seqs", "8"]]
)
def test_no_heavy_library_is_imported(words: list[str], argv: list[str]) -> None:
    """What makes `vime check` answer at once."""
    if argv[0] == "check":
        argv = [*argv, *words]
    code = (
        "import sys; from vime.cli import main\n"
        f"code = main({argv!r})\n"
        f"print('\\nimported', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.splitlines()[-1] == "imported [] 0", run.stdout + run.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "vime: No space left on device\n"),
        (OSError(30, "Read-only file system", "/runs/1"), "vime: /runs/1: Read-only file system\n"),
    ],
)
def test_what_the_machine_refuses_is_said_without_a_stack(
    words: list[str], error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_training(monkeypatch, error)
    assert cli.main(["train", *words]) == 1
    assert capsys.readouterr().err == said
    start_training(monkeypatch, FileNotFoundError(2, "No such file or directory", "x"))  # our own mistake
    with pytest.raises(FileNotFoundError):
        cli.main(["train", *words])


def test_no_problem_fills_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--num-rollout", "1" * 100_000]) == 2
    assert len(capsys.readouterr().err) < 5000


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rm-url", "http://u:hunter2@h/?token=hunter2"],  # means nothing without --rm-type remote_rm
        ["--lr", "http://u:hunter2@h"],
        ["--rm-ulr", "http://u:hunter2@h"],
        ["--rm-type", "https://h/?key=hunter2"],
        ["--vllm-hf-token", "hunter2", "--vllm-hf-token", "hunter22"],
    ],
)
def test_no_problem_repeats_credentials(wrong: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *words, *wrong]) == 2
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


def test_check_says_what_would_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in (
        "qwen3, 132K parameters, 2 layers, from",
        "4 ranks: DP 4; policy_loss",
        "4 x vLLM with 1 worker(s) on the same CPU",
        "prompts.jsonl: 10 rows",
        "3 rollouts of 4 prompts x 8 answers, 1 optimizer step each: 3 in all",
    ):
        assert part in shown.out


def test_check_says_all_that_is_wrong(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words, "--vllm-seed", "3", "--save-interval", "3"]
    words[words.index("--lr") + 1] = "fast"
    assert cli.main(["check", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "vime: 3 problems:",
        "  - --lr fast: not a number",
        "  - --vllm-seed is vime's to set: --seed",
        "  - --save-interval 3 means nothing without --save; add that or leave this out",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_load_from_nothing_is_said(words: list[str], capsys: pytest.CaptureFixture[str], there: bool) -> None:
    if there:
        Path("run").mkdir()
    assert cli.main(["check", *words, "--save", "run", "--load", "run"]) == 0
    state = "is empty" if there else "does not exist yet"
    assert f"run {state}: a fresh start from --hf-checkpoint" in capsys.readouterr().out


def test_train_checks_first(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = start_training(monkeypatch)
    assert cli.main(["train", *words, "--save-interval", "3"]) == 2
    assert not called
    assert cli.main(["train", *words]) == 0
    assert called[0].rollout.num_rollout == 3


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("row 3 is bad"), 2, "row 3 is bad"),
        (TrainerError("rank 1 died"), 1, "vime: rank 1 died"),
        (KeyboardInterrupt(), 130, "vime: interrupted"),
    ],
)
def test_exit_codes(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    start_training(monkeypatch, error)
    assert cli.main(["train", *words]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_an_error_of_ours_keeps_its_traceback(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start_training(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", *words])


def test_train_py_is_vime_train(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "train.py"
    run = subprocess.run(
        [sys.executable, str(script), "--colocat"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert "unknown flag --colocat: did you mean --colocate?" in run.stderr


@pytest.mark.parametrize(
    ("argv", "code", "shown"),
    [
        ([], 2, "usage: vime COMMAND"),
        (["--help"], 0, "usage: vime COMMAND"),
        (["--version"], 0, "0."),
        (["trian"], 2, "unknown command 'trian'; did you mean vime train?"),
        (["train", "--help"], 0, "optimizer    Optimizer ("),
        (["check", "-h"], 0, "usage: vime check"),
        (["train", "--help-topic", "reward"], 0, "--rm-type {deepscaler,math,dapo,f1,random,remote_rm}"),
        (["train", "--help-topic", "optimiser"], 2, "did you mean optimizer?"),
        (["train", "--help-topic"], 2, "--help-topic takes one of checkpoint, rollout,"),
        (["train", "--help-all"], 0, "--[no-]offload-train"),
        (["report"], 2, "the following arguments are required: RUN"),
        (["report", "/nowhere"], 2, "/nowhere/metrics.jsonl does not exist"),
        (["convert", "a"], 2, "the following arguments are required: TARGET"),
        (["convert", "/nowhere", "b"], 2, "SOURCE /nowhere: no such directory"),
        (["convert", "a", ""], 2, "argument TARGET: '' is no path"),
        (["convert", "a", "b\0"], 2, "argument TARGET: 'b\\x00' is no path"),
        (["report", " "], 2, "argument RUN: ' ' is no path"),
    ],
)
def test_commands(capsys: pytest.CaptureFixture[str], argv: list[str], code: int, shown: str) -> None:
    assert cli.main(argv) == code
    output = capsys.readouterr()
    assert shown in output.out + output.err


def test_help_has_a_line_for_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    from vime.config.flags import flags

    cli.main(["train", "--help-all"])
    shown = capsys.readouterr().out
    for flag in flags().values():
        assert (f"--[no-]{flag.text[2:]}" if flag.has_negation else flag.text) in shown


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "rollout/reward_mean": 0.5}) + "\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page.parent == tmp_path
    assert "<html" in page.read_text()


def test_convert_refuses(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model")
    assert cli.main(["convert", model, model, "--hf-checkpoint", model]) == 2
    shown = capsys.readouterr().err
    assert f"--hf-checkpoint {model} means nothing: SOURCE {model} is a Hugging Face directory itself" in shown
    assert f"TARGET {model} exists already" in shown
    (tmp_path / "empty").mkdir()
    assert cli.main(["convert", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "neither a Hugging Face directory (no config.json) nor a Megatron torch_dist" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--help", "data"]])  # more and less than a buffer
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    """As in `vime train --help | head -1`."""
    command = [sys.executable, "-m", "vime.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141
