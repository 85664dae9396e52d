"""What a Hugging Face config says reaches Megatron's: log-probs of unusual shapes are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import hf_log_probs, hf_model, make_batch, trainer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "router weights not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "one expert, not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "dense layers between": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "every second layer": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts_per_tok": 3}),
    "heads wider than the model": ("qwen3", {"head_dim": 48, "num_key_value_heads": 1}),
    "other base and epsilon": ("llama", {"rope_theta": 123.0, "rms_norm_eps": 0.1, "num_key_value_heads": 4}),
    "one head": ("qwen2", {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 501, "head_dim": 64}),
}


def differences(rank: int, paths: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, path in paths.items():
        batch = make_batch()
        with torch.no_grad():
            theirs, _ = hf_log_probs(hf_model(path), batch)
        batch.rollout_log_probs = [values.tolist() for values in theirs]
        with trainer(rank, path) as built:
            found[name] = built.train(0, batch)["train/logprob_abs_diff_max"]
    return found


def test_unusual_shapes_compute_what_transformers_computes(tmp_path: Path) -> None:
    paths = {name: make_checkpoint(tmp_path / name, family, **more) for name, (family, more) in CASES.items()}
    found = run_ranks(1, differences, paths)[0]
    assert found.keys() == CASES.keys()
    # fp32, sums in another order; a wrong base, epsilon, router or head would be off by 0.01 and more
    assert max(found.values()) < 2e-5, found
