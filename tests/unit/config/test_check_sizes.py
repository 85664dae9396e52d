from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from tests.unit.config.conftest import CPU, FOUR_GPUS, Problems

NO_MODEL_FLAGS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention"),
    *("--num-query-groups", "--kv-channels", "--qk-layernorm", "--swiglu", "--normalization", "--norm-epsilon"),
    *("--rotary-base", "--use-rotary-position-embeddings", "--disable-bias-linear", "--vocab-size"),
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 4",
            "4 trainer ranks (--actor-num-nodes 1 x --actor-num-gpus-per-node 4) cannot be cut into "
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-size 4 = 8",
        ),
        (
            "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 4",
            "number of key/value heads (2) is not divisible",
        ),
        (
            "--pipeline-model-parallel-size 4",
            "number of layers (2) is not divisible by --pipeline-model-parallel-size (4)",
        ),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 means nothing: the model has no experts"),
        (
            "--global-batch-size 12",
            "a rollout has 32 answers (--rollout-batch-size 4 x --n-samples-per-prompt 8), which --global-batch-size "
            "12 does not divide; the next smaller that does is 8",
        ),
        ("--global-batch-size 64", "does not divide; the next smaller that does is 32"),
        ("--global-batch-size 2", "--global-batch-size 2 is not divisible by the 4 data parallel ranks"),
        (
            "--rollout-num-gpus-per-engine 3",
            "--rollout-num-gpus 4 is not a multiple of --rollout-num-gpus-per-engine 3: 1 whole engines and 1 GPUs",
        ),
        (
            "--rollout-num-gpus 9 --rollout-num-gpus-per-engine 3",
            "engine of --rollout-num-gpus-per-engine 3 would lie half on each: ",
        ),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 4",
            "an engine must lie on one node, but --rollout-num-gpus-per-engine 4 does not divide",
        ),
        ("--rollout-num-gpus-per-engine 3 --rollout-num-gpus 3", "vLLM cuts the 4 attention heads over the GPUs"),
        ("--rollout-max-response-len 64 --rollout-max-context-len 64", "leaves no room for a prompt in"),
        ("--rollout-max-prompt-len 90 --rollout-max-context-len 80", "--rollout-max-prompt-len 90 leaves no room"),
        ("--rollout-max-context-len 4096", "is more than the model's max_position_embeddings (2048)"),
        (
            "--rollout-max-response-len 2048",
            "leaves no room for a prompt in the model's max_position_embeddings (2048)",
        ),
        (
            "--rollout-max-prompt-len 1024 --rollout-max-response-len 1025",
            "--rollout-max-prompt-len 1024 + --rollout-max-response-len 1025 is more than the model's",
        ),
        ("--recompute-num-layers 3", "--recompute-num-layers 3 is more than the 2 layers of a pipeline stage"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "2 layers do not divide into pipeline stages",
        ),
    ],
)
def test_one_thing_wrong(problems: Problems, change: str, problem: str) -> None:
    said = problems(change)
    assert any(problem in one for one in said), said


@pytest.mark.parametrize(
    "change",
    [
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 4",
        "--rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus 2",
        "--global-batch-size 8",
    ],
)
def test_layouts_that_work(problems: Problems, change: str) -> None:
    assert problems(change) == []


@pytest.mark.parametrize(
    "change",
    [
        "--expert-model-parallel-size 4",
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --moe-grouped-gemm --moe-router-dtype fp32",
    ],
)
def test_layouts_with_experts_that_work(problems: Problems, experts: str, change: str) -> None:
    said = problems(f"--hf-checkpoint {experts} --ref-load {experts} {change}", without=NO_MODEL_FLAGS)
    assert said == []


def test_a_second_node_needs_a_cluster(problems: Problems) -> None:
    change = "--actor-num-nodes 2"
    (said,) = problems(change, machine=FOUR_GPUS)
    assert "--actor-num-nodes 2 needs a Ray cluster" in said
    assert problems(change, machine=dataclasses.replace(FOUR_GPUS, joined=True)) == []
    assert problems(change, machine=CPU) == []


def test_experts_that_vllm_pads_on_a_cpu(problems: Problems, experts: str) -> None:
    two = f"--hf-checkpoint {experts} --ref-load {experts} --rollout-num-gpus-per-engine 2"
    assert problems(two, without=NO_MODEL_FLAGS, machine=CPU) == []  # 64 over 2
    (said,) = problems("--rollout-num-gpus-per-engine 4", machine=CPU)
    assert "an expert's width is 16 in each worker" in said
    assert problems(machine=FOUR_GPUS) == []
    assert problems("--vllm-enable-expert-parallel", machine=CPU) == []


def test_prompts_cannot_be_split_on_a_cpu(problems: Problems) -> None:
    (said,) = problems("--vllm-enable-chunked-prefill", machine=CPU)
    assert said.startswith("--vllm-enable-chunked-prefill: on a CPU the engine dies")
    assert problems(machine=FOUR_GPUS) == []


def test_prompts_that_are_not_split_are_fine_on_a_cpu(problems: Problems) -> None:
    assert problems("--vllm-no-enable-chunked-prefill", machine=CPU) == []


DEEPEP = "--moe-token-dispatcher-type flex --moe-enable-deepep"


def test_deepep_needs_ranks_to_send_to_and_gpus(
    problems: Problems, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json" if name == "deep_ep" else name))
    model = f"--hf-checkpoint {experts} --ref-load {experts} {DEEPEP}"
    (alone,) = problems(model, without=NO_MODEL_FLAGS, machine=FOUR_GPUS)
    assert "every rank has all experts; use --moe-token-dispatcher-type alltoall" in alone
    assert problems("--expert-model-parallel-size 4", machine=FOUR_GPUS) == []
    (cpu,) = problems(machine=CPU)
    assert cpu.startswith("--moe-enable-deepep needs GPUs, and this run is on the CPU")
