"""The run of the first requirement, made small, and the files it names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import DataError
from vime.models.layout import checkpoint_tensors
from vime.models.spec import spec_from_hf

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def write_checkpoint(folder: Path, **shape: Any) -> str:
    """A Hugging Face directory as the check looks at it: config, tokenizer files, and weights that are a header and a
    hole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    try:
        tensors = checkpoint_tensors(spec_from_hf(folder))
    except DataError:  # a test of a config that is refused
        tensors = {"x": (1,)}
    write_weights(folder / "model.safetensors", tensors)
    return str(folder)


def write_weights(file: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    entries, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def write_prompts(file: Path, count: int = 10) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1?"}], "label": str(i + 1)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def required_run(model: str, prompts: str) -> dict[str, list[str]]:
    """The flags of the run that must work, in their order, each with the words after it; only sizes are smaller."""
    text = f"""
        --train-backend megatron --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
        --rollout-num-gpus-per-engine 1 --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm --swiglu --normalization RMSNorm
        --norm-epsilon 1e-6 --rotary-base 10000 --use-rotary-position-embeddings --disable-bias-linear --vocab-size 512
        --hf-checkpoint {model} --ref-load {model}
        --prompt-data {prompts} --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
        --rm-type deepscaler --colocate
        --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 64
        --rollout-temperature 1.0 --global-batch-size 32 --balance-data
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --entropy-coef 0.0
        --eps-clip 0.2 --eps-clip-high 0.28
        --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
        --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size
        --max-tokens-per-gpu 256 --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
        --attention-softmax-in-fp32 --attention-backend flash --train-memory-margin-bytes 2147483648 --use-tensorboard
    """
    flags: dict[str, list[str]] = {}
    for word in text.split():
        if word.startswith("--"):
            flags[word] = last = []
        else:
            last.append(word)
    return flags


def command_line(flags: dict[str, list[str]]) -> list[str]:
    return [word for flag, values in flags.items() for word in (flag, *values)]
