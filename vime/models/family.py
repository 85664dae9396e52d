"""What a model family says about itself: how to read its config, and how Megatron's parameters hold its tensors.

A rule says which checkpoint tensors one Megatron parameter holds and how it is put together and cut. The parameter
names are those of Megatron-Core's local layer spec (no TransformerEngine), with SequentialMLP's names for experts.

=============  ===========================================================================================
kind           the whole parameter, and the part of tensor parallel rank r of n
=============  ===========================================================================================
replicated     the tensor; every rank holds all of it
row            the tensor [out, in]; rank r holds columns r of n (Megatron's RowParallelLinear)
gated          [gate; up]; rank r holds [gate_r; up_r], each cut along its rows
qkv            per key/value group the rows [q_0 .. q_(heads/groups - 1), k, v]; rank r holds groups r of n
vocab          the tensor's rows, padded at the end to a multiple of n; rank r holds rows r of n
=============  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vime.models.hf_config import HFConfig
from vime.models.spec import ModelSpec

Kind = Literal["replicated", "row", "gated", "qkv", "vocab"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter. ``{layer}`` and ``{expert}`` in names stand for numbers: global in checkpoint names,
    counted within the model chunk and within the rank in the parameter's name."""

    param: str
    kind: Kind
    tensors: tuple[tuple[str, Shape], ...]  # checkpoint name and shape, in the order of the kind

    @property
    def is_expert(self) -> bool:
        """One parameter per expert: cut by expert parallelism and expert tensor parallelism."""
        return "{expert}" in self.param


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``."""

    model_type: str
    architecture: str  # the class in transformers and vLLM
    read: Callable[[HFConfig], ModelSpec]
    layer_rules: Callable[[ModelSpec, bool], list[Rule]]  # (spec, the layer has experts)


def embedding_rule(spec: ModelSpec) -> Rule:
    shape = (spec.vocab_size, spec.hidden_size)
    return Rule("embedding.word_embeddings.weight", "vocab", (("model.embed_tokens.weight", shape),))


def final_norm_rule(spec: ModelSpec) -> Rule:
    return Rule("decoder.final_layernorm.weight", "replicated", (("model.norm.weight", (spec.hidden_size,)),))


def output_rule(spec: ModelSpec) -> Rule:
    name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    return Rule("output_layer.weight", "vocab", ((name, (spec.vocab_size, spec.hidden_size)),))


def decoder_layer_rules(spec: ModelSpec, moe: bool) -> list[Rule]:
    """A pre-norm decoder layer in Llama's names: attention with grouped queries, gated MLP or experts."""
    hf, mc = "model.layers.{layer}.", "decoder.layers.{layer}."
    h, d = spec.hidden_size, spec.kv_channels
    q, kv = spec.num_attention_heads * d, spec.num_query_groups * d
    attention = mc + "self_attention."
    rules = [
        Rule(mc + "input_layernorm.weight", "replicated", ((hf + "input_layernorm.weight", (h,)),)),
        Rule(
            attention + "linear_qkv.weight",
            "qkv",
            tuple((hf + f"self_attn.{x}_proj.weight", (n, h)) for x, n in (("q", q), ("k", kv), ("v", kv))),
        ),
        Rule(attention + "linear_proj.weight", "row", ((hf + "self_attn.o_proj.weight", (h, q)),)),
        Rule(mc + "pre_mlp_layernorm.weight", "replicated", ((hf + "post_attention_layernorm.weight", (h,)),)),
    ]
    if spec.qkv_bias:
        tensors = tuple((hf + f"self_attn.{x}_proj.bias", (n,)) for x, n in (("q", q), ("k", kv), ("v", kv)))
        rules.append(Rule(attention + "linear_qkv.bias", "qkv", tensors))
    if spec.qk_layernorm:
        for x in "qk":
            norm = ((hf + f"self_attn.{x}_norm.weight", (d,)),)
            rules.append(Rule(attention + f"{x}_layernorm.weight", "replicated", norm))
    if not moe:
        return rules + mlp_rules(mc + "mlp.", hf + "mlp.", h, spec.ffn_hidden_size)
    assert spec.num_experts is not None
    assert spec.moe_ffn_hidden_size is not None
    router = ((hf + "mlp.gate.weight", (spec.num_experts, h)),)
    rules.append(Rule(mc + "mlp.router.weight", "replicated", router))
    experts = mc + "mlp.experts.local_experts.{expert}."
    return rules + mlp_rules(experts, hf + "mlp.experts.{expert}.", h, spec.moe_ffn_hidden_size)


def mlp_rules(param: str, tensor: str, hidden: int, width: int) -> list[Rule]:
    """A gated MLP under Megatron's prefix ``param`` and the checkpoint's prefix ``tensor``."""
    gate_up = tuple((tensor + f"{x}_proj.weight", (width, hidden)) for x in ("gate", "up"))
    return [
        Rule(param + "linear_fc1.weight", "gated", gate_up),
        Rule(param + "linear_fc2.weight", "row", ((tensor + "down_proj.weight", (hidden, width)),)),
    ]


def read_decoder(config: HFConfig, *, head_dim: int | None = None, **more: object) -> ModelSpec:
    """The entries that Llama-like configs share. ``head_dim``: the family's default (None: hidden size over heads);
    ``more``: what the family adds to the ModelSpec."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if config.get("head_dim", default=head_dim) is None and hidden % heads:
        config.refuse(f"hidden_size {hidden} over {heads} attention heads without head_dim")
    fields: dict[str, object] = {
        "family": config.model_type,
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.size("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.size("num_key_value_heads", default=heads),
        "kv_channels": config.size("head_dim", default=head_dim or max(1, hidden // heads)),
        "vocab_size": config.size("vocab_size"),
        "tied": config.switch("tie_word_embeddings"),
        "qk_layernorm": False,
        "qkv_bias": False,
        "norm_epsilon": config.number("rms_norm_eps", default=1e-6),
        "rotary_base": config.rotary_base(),
        "max_position_embeddings": config.size("max_position_embeddings"),
        "dtype": config.dtype,
        "eos_token_ids": config.eos_token_ids(),
    }
    config.refuse_sliding_window()
    return ModelSpec(**{**fields, **more})  # type: ignore[arg-type]
