"""Llama 2 and 3 without rope scaling, and models published in its format."""

from __future__ import annotations

from vime.models.family import Family, decoder_layer_rules, read_decoder
from vime.models.hf_config import HFConfig
from vime.models.spec import ModelSpec


def read(config: HFConfig) -> ModelSpec:
    config.refuse_unless("attention_bias", False)
    config.refuse_unless("mlp_bias", False)
    return read_decoder(config)


FAMILY = Family("llama", "LlamaForCausalLM", read, decoder_layer_rules)
