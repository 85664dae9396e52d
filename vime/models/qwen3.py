"""Qwen3, dense: RMSNorm on queries and keys, heads of 128 unless said otherwise."""

from __future__ import annotations

from vime.models.family import Family, decoder_layer_rules, read_decoder
from vime.models.hf_config import HFConfig
from vime.models.spec import ModelSpec


def read(config: HFConfig) -> ModelSpec:
    config.refuse_unless("attention_bias", False)
    return read_decoder(config, head_dim=128, qk_layernorm=True)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, decoder_layer_rules)
