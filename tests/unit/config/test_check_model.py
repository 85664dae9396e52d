from __future__ import annotations

import pytest

from tests.unit.config.conftest import Problems
from tests.unit.config.test_check_sizes import NO_MODEL_FLAGS
from vime.config.check_model import layer_pattern


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("--num-layers 3", "--num-layers 3, but the checkpoint has 2"),
        ("--hidden-size 65", "--hidden-size 65, but the checkpoint has 64"),
        ("--norm-epsilon 1e-5", "--norm-epsilon 1e-05, but the checkpoint has 1e-06"),
        ("--rotary-base 1000000", "--rotary-base 1000000.0, but the checkpoint has 10000.0"),
        ("--untie-embeddings-and-output-weights", "tied embeddings"),
        ("--add-qkv-bias", "no bias in the QKV projection"),
        ("--num-experts 4", "--num-experts 4, but the checkpoint has none (it is a dense model)"),
    ],
)
def test_flags_that_differ_from_the_checkpoint(problems: Problems, dense: str, change: str, values: str) -> None:
    (said,) = problems(change)
    assert values in said
    assert f"(--hf-checkpoint {dense})" in said


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        ("--qk-layernorm false", "a norm on queries and keys"),
        ("--swiglu false", "a gated SiLU MLP"),
        ("--disable-bias-linear false", "no bias in linear layers"),
        ("--use-rotary-position-embeddings false", "a rotary position embedding"),
        ("--group-query-attention false", "2 key/value heads for 4 query heads"),
    ],
)
def test_switches_turned_off_that_the_checkpoint_has(problems: Problems, dense: str, change: str, theirs: str) -> None:
    said = problems(change, without=[change.split()[0]])
    assert said == [f"{change}, but the checkpoint has {theirs} (--hf-checkpoint {dense})"]


def test_attention_probabilities_in_less_than_fp32(problems: Problems) -> None:
    (said,) = problems("--attention-softmax-in-fp32 false", without=["--attention-softmax-in-fp32"])
    assert said.startswith("--attention-softmax-in-fp32 false: attention probabilities are always in fp32 here")


def test_switches_turned_off_that_the_checkpoint_lacks(problems: Problems) -> None:
    assert problems("--add-qkv-bias false --untie-embeddings-and-output-weights false") == []


@pytest.mark.parametrize(
    "change", ["--moe-router-dtype fp32", "--moe-grouped-gemm", "--moe-token-dispatcher-type allgather"]
)
def test_flags_of_experts_on_a_dense_model(problems: Problems, dense: str, change: str) -> None:
    assert problems(change) == [f"{change} means nothing: {dense} has no experts; leave it out"]


def test_experts_agree(problems: Problems, experts: str) -> None:
    change = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq [1]*2 --moe-grouped-gemm"
    assert problems(f"--hf-checkpoint {experts} --ref-load {experts} {change}", without=NO_MODEL_FLAGS) == []


def test_experts_in_other_layers(problems: Problems, experts: str) -> None:
    change = f"--hf-checkpoint {experts} --ref-load {experts} --moe-layer-freq [0]*1+[1]*1"
    (said,) = problems(change, without=NO_MODEL_FLAGS)
    assert "puts experts in 1 of 2 layers, but the checkpoint has them in 2 of 2" in said


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", (True, True, True, True)),
        ("2", (True, False, True, False)),
        ("[0]*1+[1]*3", (False, True, True, True)),
        ("([0] + [1]) * 2", (False, True, False, True)),
        ("[1, 0, 0, 1]", (True, False, False, True)),
        ("0", None),
        ("[2]*4", None),
        ("__import__('os')", None),
        ("every", None),
    ],
)
def test_layer_pattern(text: str, pattern: tuple[bool, ...] | None) -> None:
    assert layer_pattern(text, 4) == pattern
