"""Settings that contradict each other or mean nothing are refused, each with its reason."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.unit.config.conftest import Problems
from vime.config.check_meaning import NEEDS
from vime.config.flags import flags
from vime.rollout.rewards import MATHEMATICAL

VALUES = {
    "kl_loss_coef": "0.1",
    "kl_loss_type": "k3",
    "recompute_method": "uniform",
    "reward_key": "score",
    "custom_rm_path": "m.f",
    "eval_prompt_data": "test PROMPTS",
    "apply_chat_template_kwargs": '{"a":1}',
    "tool_key": "tools",
    "wandb_project": "p",
    "eval_temperature": "0.5",
    "eval_top_p": "0.5",
    "tis_clip_low": "0.1",
}


@pytest.mark.parametrize("name", [name for name in NEEDS if name != "moe_enable_deepep"])
def test_an_option_without_what_it_depends_on(problems: Problems, name: str, prompts: str) -> None:
    flag = flags()[name]
    value = "" if flag.type is bool else VALUES.get(name, "3").replace("PROMPTS", prompts)
    present = {option for needed in NEEDS.values() for option in needed} & {
        "use_kl_loss",
        "colocate",
        "apply_chat_template",
    }
    present |= {"use_dynamic_batch_size", "recompute_granularity"}
    needed = [other for other in NEEDS[name] if other in present]
    said = problems(f"{flag.text} {value}", without=[flags()[other].text for other in needed])
    others = " or ".join(flags()[other].text for other in NEEDS[name])
    written = f"{flag.text} {value}".strip()
    assert [problem for problem in said if problem.startswith(f"{flag.text} ") and f"without {others}" in problem], said
    if name not in ("kl_loss_coef", "kl_loss_type", "apply_chat_template_kwargs"):
        assert any(problem.startswith(written) for problem in said)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("--kl-loss-coef 0.1 --kl-loss-type k1", "as a loss, k1 has an expected gradient of zero; use low_var_kl"),
        (
            "--update-weight-disk-dir d",
            "--update-weight-disk-dir d means nothing with --update-weight-transport planned",
        ),
        (
            "--update-weight-transport disk --update-weight-buffer-size 1000000",
            "--update-weight-buffer-size 1000000 means nothing with --update-weight-transport disk; leave it out",
        ),
        (
            "--update-weight-transport bucketed --no-copy-engines",
            "--no-copy-engines means nothing with --update-weight-transport bucketed; leave it out",
        ),
        ("--num-epoch 1", "--num-rollout 3 and --num-epoch 1 both say how long; keep one"),
        ("--rm-url http://x", "--rm-url http://x means nothing with --rm-type deepscaler"),
        ("--rm-type remote_rm", "--rm-type remote_rm needs --rm-url"),
        ("--rm-type remote_rm --rm-url localhost:80", "must start with http:// or https://"),
        ("--custom-rm-path json.loads", "--rm-type deepscaler and --custom-rm-path json.loads both reward; keep one"),
        ("--rollout-temperature 0", "all answers to a prompt would be the same"),
        (
            "--advantage-estimator rloo --disable-grpo-std-normalization",
            "means nothing with --advantage-estimator rloo",
        ),
        ("--use-tis --use-rollout-logprobs", "takes the engine's for both; keep one"),
        ("--use-rollout-logprobs --rollout-top-p 0.9", "--rollout-top-p 0.9 with --use-rollout-logprobs: the engine's"),
        ("--use-rollout-logprobs --rollout-top-k 20", "say --rollout-top-k -1, or leave --use-rollout-logprobs out"),
        ("--use-tis --tis-clip 2 --tis-clip-low 3", "--tis-clip-low 3.0 is above --tis-clip 2.0"),
        ("--micro-batch-size 1", "--micro-batch-size 1 means nothing with --use-dynamic-batch-size"),
        (
            "--recompute-granularity selective",
            "--recompute-method uniform means nothing with --recompute-granularity sel",
        ),
        ("--lr-decay-iters 5", "--lr-decay-iters 5 means nothing with --lr-decay-style constant"),
        ("--min-lr 1e-7", "--min-lr 1e-07 means nothing with --lr-decay-style constant"),
        ("--lr-decay-style cosine --min-lr 1", "--min-lr 1.0 is above --lr 1e-06"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "both say how long the warm-up is; keep one"),
        ("--lr-warmup-iters 2 --lr-warmup-init 1", "--lr-warmup-init 1.0 is above --lr 1e-06"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must be less than 1"),
        ("--lr 1e6", "--lr 1000000.0 is far above what Adam bears"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1: the ratio of new to old log-probs would be noise"),
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1: the ratio"),
        ("--save-hf out/{step}", "--save-hf out/{step}: the only placeholder is {rollout_id}"),
        ("--moe-aux-loss-coeff 0.1", "means nothing with --moe-router-load-balancing-type none"),
        ("--moe-router-load-balancing-type aux_loss", "means nothing with --moe-aux-loss-coeff 0"),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
            "seq_aux_loss balances each sequence by itself, but --use-dynamic-batch-size packs several into one row",
        ),
        ("--moe-enable-deepep", "--moe-enable-deepep needs --moe-token-dispatcher-type flex, not alltoall"),
        ("--moe-token-dispatcher-type flex", "flex needs --moe-enable-deepep"),
        ("--offload --no-offload-train", "--offload turns --offload-train on, but --no-offload-train turns it off"),
        ("--use-distributed-optimizer --overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
        ("--sequence-parallel", "--sequence-parallel means nothing with --tensor-model-parallel-size 1"),
        ("--eval-interval 2 --eval-prompt-data test", "takes pairs NAME PATH [NAME PATH ...]"),
        (
            "--dynamic-sampling-filter-path json.loads --over-sampling-batch-size 2",
            "is less than --rollout-batch-size 4",
        ),
    ],
)
def test_contradictions(problems: Problems, change: str, problem: str) -> None:
    said = problems(change)
    assert any(problem in one for one in said), said


@pytest.mark.parametrize("package", ["wandb", "deep_ep"])
def test_packages_that_are_not_there(problems: Problems, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    change = {"wandb": "--use-wandb", "deep_ep": "--moe-token-dispatcher-type flex --moe-enable-deepep"}[package]
    assert any(f"the package {package} is not installed here" in one for one in problems(change))


@pytest.mark.parametrize("kind", ["deepscaler", "math", "dapo", "f1", "random"])
@pytest.mark.parametrize("asked_by", ["flag", "row", "row, of nobody"])
def test_rewards_that_need_a_package(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, asked_by: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: find(name) if name != "math_verify" else None)
    row = {"prompt": [{"role": "user", "content": "?"}], "label": "4", "metadata": {"rm_type": kind}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    if asked_by == "flag":
        said, where = problems(f"--rm-type {kind}"), f"--rm-type {kind}"
    elif asked_by == "row":
        said, where = problems("--prompt-data p.jsonl --rm-type f1"), f"p.jsonl asks for rm_type {kind}"
    else:
        assert problems("--prompt-data p.jsonl --custom-rm-path json.loads", without=["--rm-type"]) == []
        return
    missing = f"{where}: the package math-verify, which compares mathematical answers, is not installed here"
    assert [one.startswith(missing) for one in said] == ([True] if kind in MATHEMATICAL else [])


@pytest.mark.parametrize("change", ["", "--use-tis"])
@pytest.mark.parametrize("cut", ["--rollout-top-p 0.9", "--rollout-top-k 20"])
def test_a_cut_distribution_whose_log_probs_are_not_taken_as_old(problems: Problems, change: str, cut: str) -> None:
    assert problems(f"{change} {cut}") == []


@pytest.mark.parametrize(
    "whole", ["--rollout-top-p 1.0", "--rollout-top-k 0", "--rollout-top-k -1", "--eval-top-p 0.5"]
)
def test_the_engines_log_probs_of_the_whole_distribution(problems: Problems, prompts: str, whole: str) -> None:
    evaluation = f"--eval-interval 1 --eval-prompt-data test {prompts}"
    assert problems(f"--use-rollout-logprobs {whole} {evaluation}") == []


REFERENCE = ("--ref-load", "--use-kl-loss", "--kl-loss-coef", "--kl-loss-type")


@pytest.mark.parametrize(
    ("change", "ignored"),
    [
        ("--use-rollout-logprobs", True),
        ("--use-rollout-logprobs --global-batch-size 16", True),
        ("", False),  # whether a rollout is one step is a matter of sizes, which people change and leave the rest
        ("--global-batch-size 16", False),
        ("--kl-coef 0.1", False),
        ("--kl-coef 0.1 --use-rollout-logprobs", False),
        ("--use-kl-loss --use-rollout-logprobs", False),
    ],
)
def test_a_budget_for_passes_that_there_are_not(problems: Problems, change: str, ignored: bool) -> None:
    said = problems(f"--log-probs-max-tokens-per-gpu 512 {change}", without=REFERENCE)
    start = "--log-probs-max-tokens-per-gpu 512 means nothing with --use-rollout-logprobs and without a reference"
    assert [one.startswith(start) for one in said] == [True] * ignored


def test_what_slime_demands_beside_reinforce_plus_plus_may_be_said(problems: Problems) -> None:
    """There it must be written, here it is part of the definition: it says what happens."""
    assert problems("--advantage-estimator reinforce_plus_plus --normalize-advantages") == []


def test_reference_without_use(problems: Problems, dense: str) -> None:
    said = problems(without=["--use-kl-loss", "--kl-loss-coef", "--kl-loss-type"])
    assert said == [
        f"--ref-load {dense} means nothing without --use-kl-loss or --kl-coef: no reference log-probs are computed; "
        "add one of them or leave this out"
    ]


@pytest.mark.parametrize("change", ["--kl-coef 0.1", "--kl-coef 0.1 --kl-loss-type k3"])
def test_the_reference_is_used_by_a_penalty_too(problems: Problems, change: str) -> None:
    assert problems(change, without=["--use-kl-loss", "--kl-loss-coef", "--kl-loss-type"]) == []


RL_ONLY = (
    *("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--ref-load", "--rm-type", "--colocate"),
    *("--n-samples-per-prompt", "--rollout-max-response-len", "--rollout-temperature", "--advantage-estimator"),
    *("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--entropy-coef", "--eps-clip", "--eps-clip-high"),
)


def test_supervised_training(problems: Problems) -> None:
    assert problems("--loss-type sft_loss --global-batch-size 4", without=RL_ONLY) == []


def test_supervised_training_names_everything_that_it_would_ignore(problems: Problems) -> None:
    said = problems("--loss-type sft_loss --vllm-enforce-eager")
    (ignored,) = [problem for problem in said if problem.startswith("--loss-type sft_loss uses no engines")]
    assert all(flag in ignored for flag in (*RL_ONLY, "--vllm-enforce-eager"))


@pytest.mark.parametrize("change", ["--save-samples 4", "--rollout-max-prompt-len 9", "--metadata-key m"])
def test_supervised_training_ignores_nothing(problems: Problems, change: str) -> None:
    said = problems(f"--loss-type sft_loss --global-batch-size 4 {change}", without=RL_ONLY)
    assert said == [f"--loss-type sft_loss uses no engines, rewards or policy loss; leave out {change}"]


def test_the_seed_of_supervised_training(problems: Problems) -> None:
    assert problems("--loss-type sft_loss --global-batch-size 4 --rollout-seed 3", without=RL_ONLY) == []
    (said,) = problems(without=["--rollout-shuffle"])
    assert said.startswith("--rollout-seed 3 means nothing with --loss-type sft_loss, which samples nothing")


def test_supervised_training_may_use_dropout(problems: Problems) -> None:
    change = "--loss-type sft_loss --global-batch-size 4 --attention-dropout 0.1"
    assert problems(change, without=RL_ONLY) == []


def test_tensorboard_dir_that_is_a_file(problems: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events").write_text("")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    assert problems() == [f"--use-tensorboard: TENSORBOARD_DIR {tmp_path / 'events'} is not a directory"]
