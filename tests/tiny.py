"""Tiny random checkpoints of each model family, with a small tokenizer that has a chat template."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(vocab_size: int = 512) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(os.__file__).read_text(), Path(json.__file__).read_text()], trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_checkpoint(
    folder: str | Path, family: str = "qwen3", *, tied: bool = False, dtype: str = "float32", seed: int = 0, **over: Any
) -> str:
    """Write a random checkpoint (config.json, model.safetensors, tokenizer) and return its directory.

    Weights are large enough (std 0.08, norms around 1) that a misplaced slice changes the logits visibly. ``over``
    overrides entries of the Hugging Face config, e.g. ``num_hidden_layers=4`` or ``vocab_size=500``.
    """
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    if family == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        shape |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "qwen2":
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    shape |= over
    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen2": "Qwen2", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(**shape)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in key else 0.08 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    make_tokenizer(min(512, shape["vocab_size"])).save_pretrained(folder)
    return str(folder)
