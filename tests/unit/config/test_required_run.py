"""The run that must work works, and a slip in any of its flags is answered with the message a person would want."""

from __future__ import annotations

import pytest

from tests.unit.config.conftest import FOUR_GPUS, Problems
from tests.unit.config.runs import command_line, required_run
from vime.config.flags import flags as all_flags
from vime.config.parse import parse

RUN = required_run("MODEL", "PROMPTS")


def test_nothing_is_wrong_with_it(problems: Problems) -> None:
    assert problems() == []


def test_nothing_is_wrong_with_it_on_gpus(problems: Problems) -> None:
    assert problems(machine=FOUR_GPUS) == []


def test_every_flag_arrives() -> None:
    config = parse(command_line(RUN))
    assert sorted(config.given) == sorted(flag[2:].replace("-", "_") for flag in RUN)
    assert (config.cluster.world_size, config.cluster.num_engines, config.steps_per_rollout) == (4, 4, 1)
    assert (config.optimizer.lr, config.optimizer.adam_beta2, config.algorithm.eps_clip_high) == (1e-6, 0.98, 0.28)
    assert (config.train.max_tokens_per_gpu, config.train.train_memory_margin_bytes) == (256, 2147483648)
    assert config.cluster.colocate
    assert config.data.apply_chat_template
    assert config.parallel.accumulate_allreduce_grads_in_fp32


LEFT_OUT = {
    "--hf-checkpoint": "--hf-checkpoint is missing: Hugging Face directory",
    "--prompt-data": "--prompt-data is missing: the JSONL or Parquet file",
    "--input-key": "no 'input' (--input-key); the row has prompt, label",
    "--label-key": "--label-key is missing: --rm-type deepscaler compares with the right answer in that column",
    "--apply-chat-template": "'prompt' is a list of chat messages, which needs --apply-chat-template",
    "--rm-type": "--rm-type is missing: how answers are rewarded (deepscaler, math,",
    "--num-rollout": "--num-rollout is missing: how many rollouts to run (or --num-epoch",
    "--rollout-batch-size": "--rollout-batch-size is missing: prompts per rollout",
    "--n-samples-per-prompt": "--advantage-estimator grpo compares answers to the same prompt, so it needs at least 2",
    "--use-kl-loss": "--kl-loss-coef 0.0 means nothing without --use-kl-loss; add that or leave this out",
    "--max-tokens-per-gpu": "--use-dynamic-batch-size needs --max-tokens-per-gpu",
    "--use-dynamic-batch-size": "--max-tokens-per-gpu 256 means nothing without --use-dynamic-batch-size",
    "--recompute-granularity": "--recompute-method uniform means nothing without --recompute-granularity",
    "--recompute-method": "--recompute-granularity full needs --recompute-method: uniform",
}


@pytest.mark.parametrize("flag", LEFT_OUT)
def test_leaving_one_out(problems: Problems, flag: str) -> None:
    said = problems(without=[flag])
    assert any(LEFT_OUT[flag] in problem for problem in said), said


def test_leaving_colocate_out_needs_more_gpus(problems: Problems) -> None:
    (problem,) = problems(without=["--colocate"], machine=FOUR_GPUS)
    assert problem == (
        "the run needs 8 GPUs (4 for the trainer and 4 for the engines; --colocate shares them), "
        "but this machine shows 4"
    )


@pytest.mark.parametrize("flag", [flag for flag in LEFT_OUT if all_flags()[flag[2:].replace("-", "_")].required])
def test_a_missing_required_flag_is_all_that_is_said(problems: Problems, flag: str) -> None:
    assert len(problems(without=[flag])) == 1


@pytest.mark.parametrize("flag", RUN)
def test_misspelling_any_of_them(problems: Problems, flags: dict[str, list[str]], flag: str) -> None:
    """One letter too few: exactly one problem, which names the flag that was meant."""
    middle = flag.rindex("-") + (len(flag) - flag.rindex("-")) // 2
    wrong = flag[:middle] + flag[middle + 1 :] if len(flag) > 4 else flag + flag[-1]
    flags[wrong] = flags[flag]
    said = problems(without=[flag])
    assert said == [f"unknown flag {wrong}: did you mean {flag}?"]


@pytest.mark.parametrize("flag", RUN)
def test_underscores_for_hyphens(problems: Problems, flags: dict[str, list[str]], flag: str) -> None:
    wrong = "--" + flag[2:].replace("-", "_")
    if wrong == flag:
        return
    flags[wrong] = flags[flag]
    assert problems(without=[flag]) == [f"unknown flag {wrong}: flags are written with two dashes and hyphens: {flag}"]


@pytest.mark.parametrize("flag", [flag for flag, values in RUN.items() if values])
def test_forgetting_the_value(problems: Problems, flags: dict[str, list[str]], flag: str) -> None:
    flags[flag] = []
    (problem,) = problems()
    assert problem.startswith(f"{flag} needs a value: ")


@pytest.mark.parametrize("flag", RUN)
def test_giving_it_twice(flags: dict[str, list[str]], flag: str) -> None:
    from vime.config.parse import parse_all

    said = parse_all([*command_line(flags), flag, *flags[flag]]).problems
    assert said == [f"{flag} is given twice"]
