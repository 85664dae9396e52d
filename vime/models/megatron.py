"""The part of Megatron-Core's TransformerConfig that the model's shape decides."""

from __future__ import annotations

from typing import Any

from vime.models.spec import ModelSpec


def transformer_config_kwargs(spec: ModelSpec) -> dict[str, Any]:
    """Keyword arguments for ``megatron.core.transformer.TransformerConfig``.

    The rotary base, the vocabulary and whether embeddings are tied are arguments of Megatron's GPTModel instead.
    """
    from torch.nn.functional import silu

    kwargs: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_epsilon,
        "qk_layernorm": spec.qk_layernorm,
        "add_qkv_bias": spec.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
    }
    if spec.num_experts is not None:
        kwargs |= {
            "num_moe_experts": spec.num_experts,
            "moe_router_topk": spec.moe_router_topk,
            "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
            "moe_layer_freq": [int(moe) for moe in spec.moe_layers],
            "moe_router_score_function": "softmax",
            # softmax over the chosen experts' logits is what normalising their probabilities comes to
            "moe_router_pre_softmax": not spec.norm_topk_prob,
        }
    return kwargs
