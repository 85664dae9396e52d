from __future__ import annotations

import filecmp
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from examples.arithmetic import prepare
from examples.arithmetic.reward import exact
from tests.unit.observe.test_tracker import make_config
from vime.types import Sample

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    numbers = prepare.prepare(out, seed=3)
    assert 1_000_000 <= numbers["parameters"] <= 3_000_000
    return out


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def right(prompt: str) -> str:
    return str(eval(prompt.removesuffix("=")))


def test_labels_are_right_and_unseen_problems_stand_nowhere_else(made: Path) -> None:
    train, unseen, warmup = (rows(made / f"{name}.jsonl") for name in ("train", "unseen", "warmup"))
    assert len(train) + len(unseen) == 100 * 100
    assert all(row["label"] == right(row["prompt"]) for row in train + unseen)
    seen = {row["prompt"] for row in train}
    assert not seen & {row["prompt"] for row in unseen}
    assert {row["prompt"] for row in warmup} == seen
    share = sum(row["label"] == right(row["prompt"]) for row in warmup) / len(warmup)
    assert share == pytest.approx(0.34, abs=0.01)  # 75,904 draws: standard deviation 0.002


def test_the_same_seed_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "same", seed=3)
    prepare.prepare(tmp_path / "other", seed=4)
    for name in ("train.jsonl", "unseen.jsonl", "warmup.jsonl", "model/model.safetensors", "model/tokenizer.json"):
        assert filecmp.cmp(made / name, tmp_path / "same" / name, shallow=False)
    assert not filecmp.cmp(made / "unseen.jsonl", tmp_path / "other" / "unseen.jsonl", shallow=False)
    assert not filecmp.cmp(made / "model/model.safetensors", tmp_path / "other/model/model.safetensors", shallow=False)


@pytest.mark.parametrize(("kind", "limit"), [("add", 30), ("sub", 30), ("mul", 20), ("add3", 9), ("add,sub,mul", 12)])
def test_kinds(kind: str, limit: int) -> None:
    found = prepare.problems(kind.split(","), limit)
    assert len({text for text, _ in found}) == len(found)
    assert all(right(text) == str(answer) for text, answer in found)
    tokenizer = prepare.make_tokenizer()
    text = "".join(text + str(answer) for text, answer in found)
    assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_slips_are_wrong_and_keep_the_sign() -> None:
    rng = random.Random(0)
    for answer in (-5, 0, 1, 42, 198):
        slips = [prepare.slip(answer, rng) for _ in range(50)]
        assert answer not in slips
        assert answer < 0 or min(slips) >= 0


def test_tokenizer_is_lossless_and_its_template_opens_the_answer(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    for text in ("17+25=", "-3", "1 2  3?", "100*99-98="):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "17+25="}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>17+25=<|end|><|assistant|>"
    assert len(tokenizer.encode(prompt)) == 9
    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("42", 1.0), ("42<|end|>", 1.0), ("42 ", 0.0), ("=42", 0.0), ("042", 0.0), ("421", 0.0), ("", 0.0)],
)
def test_only_the_exact_answer_is_rewarded(tmp_path: Path, response: str, reward: float) -> None:
    sample = Sample(index=0, group_index=0, prompt="17+25=", prompt_tokens=[1], label="42", response=response)
    assert exact(make_config(tmp_path), sample) == reward


@pytest.mark.parametrize(
    ("flags", "message"), [(["--kind", "div"], "no kind of problem 'div'"), (["--max", "10"], "too few")]
)
def test_bad_options_are_said(tmp_path: Path, flags: list[str], message: str) -> None:
    command = [sys.executable, ROOT / "examples/arithmetic/prepare.py", "--out", tmp_path / "out", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_both_recipes_pass_the_check(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vime.cli import main

    here = ROOT / "examples" / "arithmetic"
    model = ["--hf-checkpoint", str(made / "model"), "--device", "cpu"]
    warmup = ["check", "--config", str(here / "warmup.yaml"), *model, "--prompt-data", str(made / "warmup.jsonl")]
    assert main(warmup) == 0, capsys.readouterr().err
    grpo = ["check", "--config", str(here / "grpo.yaml"), *model, "--prompt-data", str(made / "train.jsonl")]
    assert main([*grpo, "--eval-prompt-data", "unseen", str(made / "unseen.jsonl")]) == 0, capsys.readouterr().err
