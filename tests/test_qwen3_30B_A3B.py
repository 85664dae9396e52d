"""Qwen3-30B-A3B from prompt to trained weights and back into the engine: two rollouts through ``train.py``.

On GPUs as many layers of the true shape as fit, in random bfloat16, on all of up to eight GPUs; on a CPU the same
architecture in miniature, in fp32 on two ranks. The flags are those of scripts/models/qwen3-30B-A3B.sh.

``USE_DEEPEP=1`` takes DeepEP's token dispatcher instead of the all-to-all one. Where that cannot run, the run must be
refused in words before it starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, RUN_SECONDS, as_flags, make_prompts, running
from tests.tiny import make_tokenizer
from vime.cluster.device import gpu_count
from vime.config.check_memory import check_memory
from vime.config.machine import GIB, look
from vime.config.parse import parse
from vime.models.layout import checkpoint_tensors
from vime.models.spec import ModelSpec, spec_from_hf

SCRIPT = ROOT / "scripts" / "models" / "qwen3-30B-A3B.sh"
USE_DEEPEP = os.environ.get("USE_DEEPEP", "0") == "1"
GPUS = 1 << min(3, max(gpu_count(), 1).bit_length() - 1) if gpu_count() else 0  # 1, 2, 4 or 8; 0: on the CPU
RANKS = GPUS or 2

TRUE_SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
MINIATURE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "torch_dtype": "float32",
}
FLAG_OF = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_key_value_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "vocab_size": "vocab-size",
    "num_experts": "num-experts",
    "num_experts_per_tok": "moe-router-topk",
    "moe_intermediate_size": "moe-ffn-hidden-size",
}


def layout() -> dict[str, Any]:
    """One engine on all ranks. Eight GPUs: TP4 CP2 EP8, the layout in which two ranks once took themselves for the
    engine's coordinator."""
    tensor = min(4, RANKS)
    return {
        "actor-num-nodes": 1,
        "actor-num-gpus-per-node": RANKS,
        "rollout-num-gpus": RANKS,
        "rollout-num-gpus-per-engine": RANKS,
        "colocate": True,
        "tensor-model-parallel-size": tensor,
        "sequence-parallel": tensor > 1,
        "pipeline-model-parallel-size": 1,
        "context-parallel-size": RANKS // tensor,
        "expert-model-parallel-size": RANKS,
        "expert-tensor-parallel-size": 1,
        "use-distributed-optimizer": True,
    }


def recipe() -> dict[str, Any]:
    longest = 256 if GPUS else 12
    return {
        "input-key": "prompt",
        "label-key": "label",
        "apply-chat-template": True,
        "rollout-shuffle": True,
        "custom-rm-path": "tests.e2e.runs.parity_reward",  # of random weights no answer is right
        "num-rollout": 2,
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "rollout-max-response-len": longest,
        "rollout-temperature": 1.0,
        "global-batch-size": 16,
        "balance-data": True,
        "advantage-estimator": "gspo",
        "eps-clip": "4e-4",
        "use-kl-loss": True,
        "kl-loss-coef": 0.0,
        "kl-loss-type": "low_var_kl",
        "entropy-coef": 0.0,
        "optimizer": "adam",
        "lr": "1e-5" if GPUS else "1e-3",
        "lr-decay-style": "constant",
        "weight-decay": 0.1,
        "adam-beta1": 0.9,
        "adam-beta2": 0.98,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": 4096 if GPUS else 256,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "accumulate-allreduce-grads-in-fp32": True,
        "attention-softmax-in-fp32": True,
        "attention-backend": "flash",
        "check-weight-update": "full",
        "no-progress": True,
        **({"vllm-enforce-eager": True, "vllm-gpu-memory-utilization": 0.3} if GPUS else {}),
    }


def model_args(shape: dict[str, Any], deepep: bool) -> dict[str, Any]:
    """The script's MODEL_ARGS, with the sizes of ``shape``."""
    command = f'source "{SCRIPT}" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True).stdout.split()
    args: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            args[last := word.removeprefix("--")] = True
        else:
            args[last] = word
    for name, flag in FLAG_OF.items():
        assert flag in args
        args[flag] = shape[name]
    assert args["moe-token-dispatcher-type"] == "alltoall"
    return args | ({"moe-token-dispatcher-type": "flex", "moe-enable-deepep": True} if deepep else {})


def write_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Random weights, a file per layer: they are made layer by layer, on a GPU where there is one."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    make_tokenizer().save_pretrained(str(folder))
    device = "cuda" if GPUS else "cpu"
    dtype = getattr(torch, shape["torch_dtype"])
    generator = torch.Generator(device).manual_seed(0)
    scale = 1.3 / math.sqrt(shape["hidden_size"])  # so that layers neither fade nor explode, and logits differ
    files: dict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, size in checkpoint_tensors(spec_from_hf(folder)).items():
        parts = name.split(".")
        files[f"layer-{parts[2]}" if parts[1] == "layers" else "ends"][name] = torch.Size(size)
    index = {}
    for file, sizes in files.items():
        tensors = {}
        for name, size in sizes.items():
            noise = torch.randn(size, generator=generator, device=device, dtype=dtype)
            tensors[name] = (1 + 0.1 * noise if "norm" in name else scale * noise).cpu()
            index[name] = f"{file}.safetensors"
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if GPUS:
        torch.cuda.empty_cache()


def layers_that_fit(folder: Path, whole: ModelSpec) -> int:
    """By what `vime check` says to four fifths of the memory that is free now (it lets a tenth too much pass), and
    to half of the disk for the checkpoint."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    free = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    config = parse([*as_flags({**layout(), **recipe(), "hf-checkpoint": "m", "prompt-data": "p"})])
    machine = dataclasses.replace(look(config), gpu_bytes=(min(map(int, free)) << 20) * 4 // 5)
    disk = shutil.disk_usage(folder).free // 2
    for layers in range(whole.num_layers, 0, -1):
        spec = whole.replace(num_layers=layers, moe_layers=whole.moe_layers[:layers])
        size = 2 * sum(math.prod(shape) for shape in checkpoint_tensors(spec).values())
        if size <= disk and not check_memory(config, spec, machine):
            return layers
    raise AssertionError(f"not one layer fits into {machine} and {disk / GIB:.0f} GiB of disk")


def why_no_deepep() -> str | None:
    """What refuses DeepEP here; None where it can run."""
    if not GPUS:
        return "--moe-enable-deepep needs GPUs, and this run is on the CPU"
    if importlib.util.find_spec("deep_ep") is None:
        return "--moe-enable-deepep: the package deep_ep is not installed here"
    return "every rank has all experts" if RANKS == 1 else None


def options(model: Path, shape: dict[str, Any], deepep: bool) -> dict[str, Any]:
    files = {"hf-checkpoint": model, "ref-load": model, "prompt-data": make_prompts(model.parent)}
    return {**layout(), **recipe(), **model_args(shape, deepep), **files}


@pytest.mark.timeout(1800 if GPUS else 600)
def test_two_rollouts(tmp_path: Path) -> None:
    shape, model = TRUE_SHAPE | MINIATURE, tmp_path / "model"
    if GPUS:
        (tmp_path / "config.json").write_text(json.dumps(TRUE_SHAPE))
        shape = TRUE_SHAPE | {"num_hidden_layers": layers_that_fit(tmp_path, spec_from_hf(tmp_path))}
    refusal = why_no_deepep() if USE_DEEPEP else None
    if refusal is not None:
        write_checkpoint(model, TRUE_SHAPE | MINIATURE)
        expect_refused(options(model, TRUE_SHAPE | MINIATURE, deepep=True), refusal)
        return
    write_checkpoint(model, shape)
    with running(options(model, shape, deepep=USE_DEEPEP), tmp_path / "run") as run:
        done = run.finish(1700 if GPUS else RUN_SECONDS)
    assert done.code == 0, done.output
    assert [row["step"] for row in done.rows] == [0, 1]
    for row in done.rows:
        # fp32 on both sides; in bfloat16 a token's last expert may be another in the engine.
        assert row["train/logprob_abs_diff"] <= (0.1 if GPUS else 1e-5), row
        assert row["train/grad_norm"] > 0
        assert math.isfinite(row["train/loss"])
        assert row["rollout/reward_std"] > 0
    print(f"{shape['num_hidden_layers']} layers on {GPUS or 'no'} GPUs: {done.rows[-1]}")


# Where DeepEP runs there is no refusal to test: USE_DEEPEP=1 then trains with it, in the test above.
@pytest.mark.skipif(why_no_deepep() is None, reason="DeepEP runs here: USE_DEEPEP=1 tests it")
def test_deepep_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    """Whatever USE_DEEPEP says."""
    write_checkpoint(tmp_path / "model", TRUE_SHAPE | MINIATURE)
    refusal = why_no_deepep()
    assert refusal is not None
    expect_refused(options(tmp_path / "model", TRUE_SHAPE | MINIATURE, deepep=True), refusal)


def expect_refused(run: dict[str, Any], words: str) -> None:
    """By train.py and by `vime check`, before anything starts."""
    for program in (["train.py"], ["-m", "vime.cli", "check"]):
        command = [sys.executable, *program, *as_flags(run)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
