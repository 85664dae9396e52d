"""Qwen3 with experts: softmax router without bias, no shared expert, dense layers where the config says so."""

from __future__ import annotations

from vime.models.family import Family, decoder_layer_rules, read_decoder
from vime.models.hf_config import HFConfig
from vime.models.spec import ModelSpec


def read(config: HFConfig) -> ModelSpec:
    config.refuse_unless("attention_bias", False)
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", default=1)
    dense = set(config.numbers("mlp_only_layers"))
    moe_layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(moe_layers):
        config.refuse("a qwen3_moe model none of whose layers has experts (decoder_sparse_step, mlp_only_layers)")
    experts, top_k = config.size("num_experts", "num_local_experts"), config.size("num_experts_per_tok")
    if top_k > experts:
        config.refuse(f"num_experts_per_tok = {top_k} of {experts} experts")
    normalised = config.switch("norm_topk_prob")
    if top_k == 1 and normalised:
        # The chosen expert's weight is then always 1 and the router never learns; Megatron refuses it, too.
        config.refuse("num_experts_per_tok = 1 with norm_topk_prob")
    return read_decoder(
        config,
        # transformers' Qwen3MoeConfig has no default head_dim but hidden_size // num_attention_heads
        head_dim=None,
        qk_layernorm=True,
        num_experts=experts,
        moe_router_topk=top_k,
        moe_ffn_hidden_size=config.size("moe_intermediate_size"),
        norm_topk_prob=normalised,
        moe_layers=moe_layers,
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, decoder_layer_rules)
