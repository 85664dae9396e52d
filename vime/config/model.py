"""The shape of the model, in Megatron-LM's words. All may be left out: ``--hf-checkpoint`` says the same."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.option import option


@dataclass(kw_only=True)
class ModelOptions:
    """Model shape (all optional; must agree with --hf-checkpoint where given)"""

    num_layers: int | None = option(None, "number of transformer layers", minimum=1)
    hidden_size: int | None = option(None, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = option(None, "width of the dense MLP", minimum=1)
    num_attention_heads: int | None = option(None, "number of query heads", minimum=1)
    group_query_attention: bool = option(False, "query heads share key/value heads (--num-query-groups of them)")
    num_query_groups: int | None = option(None, "number of key/value heads", minimum=1)
    kv_channels: int | None = option(None, "size of one head", minimum=1)
    qk_layernorm: bool = option(False, "RMSNorm on queries and keys")
    add_qkv_bias: bool = option(False, "bias in the QKV projection (Qwen2.5)")
    swiglu: bool = option(False, "gated SiLU MLP")
    normalization: str | None = option(None, "kind of normalisation", choices=("RMSNorm",))
    norm_epsilon: float | None = option(None, "epsilon of the normalisation", above=0)
    rotary_base: float | None = option(None, "base of the rotary embedding", above=0)
    use_rotary_position_embeddings: bool = option(False, "rotary position embedding")
    position_embedding_type: str | None = option(None, "kind of position embedding", choices=("rope",))
    rotary_percent: float = option(1.0, "part of a head that is rotated; only the whole of it", minimum=1, maximum=1)
    disable_bias_linear: bool = option(False, "no bias in linear layers")
    vocab_size: int | None = option(None, "size of the vocabulary before padding", minimum=1)
    make_vocab_size_divisible_by: int = option(
        1, "the embedding's rows are padded to a multiple of this times the tensor parallel size", minimum=1
    )
    untie_embeddings_and_output_weights: bool = option(False, "the output layer has its own weight")
    num_experts: int | None = option(None, "experts per MoE layer", minimum=1)
    moe_router_topk: int | None = option(None, "experts per token", minimum=1)
    moe_ffn_hidden_size: int | None = option(None, "width of one expert", minimum=1)
    moe_layer_freq: str | None = option(
        None, "which layers have experts: every n-th, or a list such as [0]*1+[1]*47", metavar="N|LIST"
    )
    moe_router_score_function: str | None = option(None, "how router logits become weights", choices=("softmax",))
    moe_router_dtype: str | None = option(None, "precision of the routing arithmetic", choices=("fp32", "fp64"))
    moe_router_load_balancing_type: str = option(
        "none",
        "auxiliary loss for balanced experts, of each packed row (aux_loss) or sequence (seq_aux_loss)",
        choices=("none", "aux_loss", "seq_aux_loss"),
    )
    moe_aux_loss_coeff: float = option(0.0, "weight of the auxiliary loss", minimum=0)
    moe_router_pre_softmax: bool = option(False, "softmax before the top-k instead of after it")
    moe_token_dispatcher_type: str = option(
        "alltoall", "how tokens reach their experts ('flex' is DeepEP)", choices=("alltoall", "allgather", "flex")
    )
    moe_grouped_gemm: bool = option(False, "one grouped matrix product per projection for all local experts")
    moe_enable_deepep: bool = option(False, "DeepEP kernels (needs --moe-token-dispatcher-type flex and deep_ep)")
    attention_dropout: float = option(0.0, "dropout on attention probabilities", minimum=0, maximum=1)
    hidden_dropout: float = option(0.0, "dropout on the residual stream", minimum=0, maximum=1)
    attention_softmax_in_fp32: bool = option(False, "attention probabilities in fp32 (always so in vime's kernels)")
    attention_backend: str = option(
        "auto",
        "attention kernel: 'flash' is torch's variable-length FlashAttention on a GPU and fused SDPA on a CPU",
        choices=("auto", "flash", "unfused"),
    )
