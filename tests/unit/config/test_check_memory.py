from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vime.config import Config
from vime.config.check_memory import check_memory, count_parameters, estimate, rank_on_cpu
from vime.config.machine import GIB, Machine, host_memory, size
from vime.config.parse import parse
from vime.models.layout import ParallelLayout, pieces
from vime.models.spec import ModelSpec

QWEN3: dict[str, Any] = {"qk_layernorm": True, "qkv_bias": False, "norm_epsilon": 1e-6, "rotary_base": 1e6}
QWEN3 |= {"max_position_embeddings": 40960, "dtype": "bfloat16", "kv_channels": 128, "vocab_size": 151936}
SMALL = ModelSpec("qwen3", 28, 1024, 3072, 16, 8, tied=True, **QWEN3)
LARGE = ModelSpec(
    *("qwen3_moe", 48, 2048, 6144, 32, 4),
    **QWEN3,
    tied=False,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    moe_layers=(True,) * 48,
)
H200 = Machine("cuda", 8, 139 * GIB, "NVIDIA H200", 1024 * GIB)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def run(flags: str) -> Config:
    base = "--hf-checkpoint m --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 "
    return parse((base + "--use-dynamic-batch-size --max-tokens-per-gpu 8192 --colocate " + flags).split())


def test_published_parameter_counts() -> None:
    one = ParallelLayout(world_size=1)
    assert round(sum(count_parameters(SMALL, one)) / 1e9, 2) == 0.60  # 0.6B on its card
    assert round(sum(count_parameters(LARGE, one)) / 1e9, 1) == 30.5  # 30.5B on its card


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"), [(1, 1, 1, 1), (2, 1, 4, 1), (1, 2, 2, 2), (2, 2, 1, 2), (4, 1, 8, 1)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_fullest_rank_holds_what_the_layout_says(tp: int, pp: int, ep: int, etp: int, tied: bool) -> None:
    """Against the shard map, which is tested against Megatron's own parameters."""
    tiny = dataclasses.replace(LARGE, num_layers=2, moe_layers=(False, True), num_experts=8, tied=tied, hidden_size=64)
    tiny = dataclasses.replace(tiny, num_query_groups=4, num_attention_heads=8, ffn_hidden_size=128, vocab_size=512)
    layout = ParallelLayout(world_size=16, tp=tp, pp=pp, ep=ep, etp=etp)
    assert layout.validate(tiny) == []
    ranks = (sum(piece.numel for piece in pieces(tiny, layout, rank)) for rank in range(16))
    fullest = max(ranks)
    # count_parameters spreads layers evenly over stages, so it is exact where stages are alike
    ours = sum(count_parameters(tiny, layout))
    if pp == 1:
        assert ours == fullest
    else:
        assert abs(ours - fullest) < sum(count_parameters(tiny, ParallelLayout(world_size=1))) / 2


def test_bytes_per_parameter() -> None:
    count = sum(count_parameters(SMALL, ParallelLayout(world_size=1)))
    needs = estimate(run("--actor-num-gpus-per-node 4"), SMALL, "cuda")
    assert (needs.weights, needs.gradients, needs.optimizer) == (2 * count, 2 * count, 12 * count)
    needs = estimate(run("--accumulate-allreduce-grads-in-fp32"), SMALL, "cuda")
    assert needs.gradients == 4 * count
    needs = estimate(run("--actor-num-gpus-per-node 4 --use-distributed-optimizer"), SMALL, "cuda")
    assert needs.optimizer == 12 * count // 4
    needs = estimate(run("--dtype fp32 --use-kl-loss"), SMALL, "cuda")
    assert (needs.weights, needs.gradients, needs.optimizer, needs.reference) == (
        4 * count,
        4 * count,
        8 * count,
        2 * 4 * count,
    )


def test_recomputing_takes_less() -> None:
    kept, again = (estimate(run(flags), SMALL, "cuda").activations for flags in ("", RECOMPUTE))
    assert again < kept / 2


@pytest.mark.parametrize("recompute", ["", RECOMPUTE])
def test_experts_and_tensor_parallelism_cut_the_sequence_in_any_case(recompute: str) -> None:
    flags = f"--actor-num-gpus-per-node 8 --tensor-model-parallel-size 8 --expert-model-parallel-size 8 {recompute}"
    flags += " --expert-tensor-parallel-size 1"
    plain, cut = (estimate(run(f"{flags} {more}"), LARGE, "cuda").activations for more in ("", "--sequence-parallel"))
    assert plain == cut
    alone = estimate(run(recompute), LARGE, "cuda").activations
    assert cut < alone / 2


@pytest.mark.parametrize("stages", ["", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 7 "])
def test_blocks_are_recomputed_layer_by_layer(stages: str) -> None:
    """Of "uniform", the number is the layers of a piece, which are all there again at once; of "block", those that are
    recomputed, one after the other, in each chunk of layers."""

    def activations(layers: int) -> int:
        block = f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}"
        return estimate(run(f"--actor-num-gpus-per-node 4 {stages}{block}"), SMALL, "cuda").activations

    every = 7 if stages else 28
    uniform = estimate(run(f"--actor-num-gpus-per-node 4 {stages}{RECOMPUTE}"), SMALL, "cuda").activations
    none = estimate(run(f"--actor-num-gpus-per-node 4 {stages}"), SMALL, "cuda").activations
    assert activations(every) == activations(40) == uniform
    assert activations(every) < activations(every // 2) < activations(1) < none


def test_the_required_run_fits_one_h200_each() -> None:
    assert check_memory(run(f"--actor-num-gpus-per-node 4 --use-kl-loss {RECOMPUTE}"), SMALL, H200) == []


def test_thirty_billion_parameters_do_not_fit_one_gpu() -> None:
    said = check_memory(run(RECOMPUTE), LARGE, H200)
    assert said[0].startswith(
        "a trainer rank needs about 460.8 GiB (weights 56.9 GiB, gradients 56.9 GiB, optimizer 341"
    )
    assert "but a GPU has 139.0 GiB" in said[0]
    assert "--use-distributed-optimizer, more GPUs, or a larger tensor, pipeline or expert parallel size" in said[0]


def test_thirty_billion_parameters_fit_eight() -> None:
    flags = (
        "--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel"
    )
    flags += f" --expert-tensor-parallel-size 1 --use-distributed-optimizer --rollout-num-gpus-per-engine 8 {RECOMPUTE}"
    assert check_memory(run(flags), LARGE, H200) == []


def test_activations_that_do_not_fit_ask_for_recomputation() -> None:
    config = run("")
    config.train.max_tokens_per_gpu = 65536
    (said,) = check_memory(config, SMALL, dataclasses.replace(H200, gpu_bytes=24 * GIB))
    assert f"{RECOMPUTE} would help" in said


def test_an_engine_too_small_for_its_model() -> None:
    flags = f"--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --use-distributed-optimizer {RECOMPUTE}"
    said = check_memory(run(flags + " --vllm-gpu-memory-utilization 0.3"), LARGE, H200)
    assert any("an engine worker needs 56.9 GiB for weights" in one and "30% of 139.0 GiB" in one for one in said)


def test_keeping_the_optimizer_beside_an_engine() -> None:
    config = run(f"--no-offload-train --vllm-gpu-memory-utilization 0.95 {RECOMPUTE}")
    (said,) = check_memory(config, dataclasses.replace(SMALL, num_layers=140, moe_layers=()), H200)
    assert said.startswith("the trainer's weights, gradients and optimizer (")
    assert "lower --vllm-gpu-memory-utilization (now 0.95)" in said


def test_an_engine_that_stays_awake_beside_the_trainer() -> None:
    flags = f"{RECOMPUTE} --vllm-gpu-memory-utilization 0.95"
    assert check_memory(run(flags), SMALL, H200) == []
    (said,) = check_memory(
        run(f"{flags} --no-offload-rollout"), dataclasses.replace(SMALL, num_layers=60, moe_layers=()), H200
    )
    assert "with --no-offload-rollout an engine keeps 95% of 139.0 GiB while the trainer works" in said
    assert check_memory(run(f"{RECOMPUTE} --no-offload-rollout"), SMALL, H200) == []


def test_what_was_measured_on_a_cpu_is_what_is_said() -> None:
    """30 layers of SmolLM2-135M, 8,192 tokens a pass: the rank had 16.7 GB when Ray ended it on 24 GiB."""
    shape = {**QWEN3, "qk_layernorm": False, "kv_channels": 64, "vocab_size": 49152}
    smol = ModelSpec("llama", 30, 576, 1536, 9, 3, tied=True, **shape)
    needs = estimate(run("--dtype fp32"), smol, "cpu")
    assert needs.tokens == 8192
    assert 16.7e9 < rank_on_cpu(needs) < 1.15 * 16.7e9


def test_on_a_cpu_what_ray_would_end_is_refused() -> None:
    needs = estimate(run(RECOMPUTE), SMALL, "cpu")
    laptop = Machine("cpu", 0, None, "", 24 * GIB)
    (said,) = check_memory(run(RECOMPUTE), SMALL, dataclasses.replace(laptop, host_bytes=needs.training))
    assert "of which Ray lets 95% be used before it ends workers: 1 trainer ranks" in said
    config = run(RECOMPUTE)
    whole = next(
        n for n in range(1, 200) if not check_memory(config, SMALL, dataclasses.replace(laptop, host_bytes=n * GIB))
    )
    (said,) = check_memory(config, SMALL, dataclasses.replace(laptop, host_bytes=(whole - 1) * GIB))
    assert float(said.removeprefix("the run needs about ").split()[0]) <= whole * 0.95 + 0.05


def test_host_memory_for_what_leaves_the_gpu() -> None:
    flags = f"--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --use-kl-loss {RECOMPUTE}"
    (said,) = check_memory(run(flags), LARGE, dataclasses.replace(H200, host_bytes=256 * GIB))
    assert "615.7 GiB in all, but the host has 256.0 GiB" in said


def test_a_laptop() -> None:
    laptop = Machine("cpu", 0, None, "", 24 * GIB)
    (said,) = check_memory(run(RECOMPUTE), LARGE, laptop)
    assert said.startswith("the run needs about ")
    assert "1 trainer ranks, each" in said
    tiny = dataclasses.replace(SMALL, num_layers=2, moe_layers=(), hidden_size=64, ffn_hidden_size=128, vocab_size=512)
    assert check_memory(run("--actor-num-gpus-per-node 4"), tiny, laptop) == []


def test_the_memory_of_this_machine() -> None:
    assert GIB < host_memory() < 1 << 50
    assert [size(count) for count in (0, 700, 3 << 20, 1536 << 20)] == ["0", "700 bytes", "3.0 MiB", "1.5 GiB"]
