"""Qwen2 and Qwen2.5, dense: bias in the QKV projection and nowhere else."""

from __future__ import annotations

from vime.models.family import Family, decoder_layer_rules, read_decoder
from vime.models.hf_config import HFConfig
from vime.models.spec import ModelSpec


def read(config: HFConfig) -> ModelSpec:
    return read_decoder(config, qkv_bias=True)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, decoder_layer_rules)
