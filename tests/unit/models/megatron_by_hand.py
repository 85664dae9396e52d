"""An independent account of where Megatron keeps Hugging Face tensors, by building its tensors: whole ones by
concatenation, then cut as its layers cut them. Slow and simple; ``vime.models.layout`` is compared with it.

Values are numpy arrays of numbers that occur once in the whole checkpoint, so that equal values mean equal places.
"""

from __future__ import annotations

import numpy as np

from vime.models.layout import Coordinates, ParallelLayout
from vime.models.spec import ModelSpec

Array = np.ndarray
PAD = -1.0


def checkpoint(spec: ModelSpec) -> dict[str, Array]:
    """Every tensor under its Hugging Face name, all numbers different."""
    total = 0

    def tensor(*shape: int) -> Array:
        nonlocal total
        size = int(np.prod(shape))
        values = np.arange(total, total + size, dtype=np.float64).reshape(shape)
        total += size
        return values

    h, d = spec.hidden_size, spec.kv_channels
    q, kv = spec.num_attention_heads * d, spec.num_query_groups * d
    found = {"model.embed_tokens.weight": tensor(spec.vocab_size, h), "model.norm.weight": tensor(h)}
    if not spec.tied:
        found["lm_head.weight"] = tensor(spec.vocab_size, h)
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = tensor(h)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"{at}self_attn.{name}_proj.weight"] = tensor(rows, h)
            if spec.qkv_bias:
                found[f"{at}self_attn.{name}_proj.bias"] = tensor(rows)
        found[f"{at}self_attn.o_proj.weight"] = tensor(h, q)
        if spec.qk_layernorm:
            found[f"{at}self_attn.q_norm.weight"] = tensor(d)
            found[f"{at}self_attn.k_norm.weight"] = tensor(d)
        mlps = [(f"{at}mlp.", spec.ffn_hidden_size)]
        if spec.moe_layers[layer]:
            assert spec.num_experts is not None
            assert spec.moe_ffn_hidden_size is not None
            found[f"{at}mlp.gate.weight"] = tensor(spec.num_experts, h)
            mlps = [(f"{at}mlp.experts.{e}.", spec.moe_ffn_hidden_size) for e in range(spec.num_experts)]
        for prefix, width in mlps:
            found[f"{prefix}gate_proj.weight"] = tensor(width, h)
            found[f"{prefix}up_proj.weight"] = tensor(width, h)
            found[f"{prefix}down_proj.weight"] = tensor(h, width)
    return found


def coordinates(layout: ParallelLayout) -> list[Coordinates]:
    """Count through the two grids of "tp-cp-ep-dp-pp", the first innermost."""
    dp = layout.world_size // layout.tp // layout.cp // layout.pp
    edp = layout.world_size // layout.etp // layout.ep // layout.pp
    dense = [
        (tp, cp, dp_, pp)
        for pp in range(layout.pp)
        for dp_ in range(dp)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    ]
    expert = [
        (etp, ep, edp_)
        for _ in range(layout.pp)
        for edp_ in range(edp)
        for ep in range(layout.ep)
        for etp in range(layout.etp)
    ]
    return [
        Coordinates(tp=tp, pp=pp, cp=cp, dp=dp_, ep=ep, etp=etp, edp=edp_)
        for (tp, cp, dp_, pp), (etp, ep, edp_) in zip(dense, expert, strict=True)
    ]


def parameters(
    spec: ModelSpec, layout: ParallelLayout, at: Coordinates, hf: dict[str, Array]
) -> dict[tuple[int, str], Array]:
    """(chunk, name) -> this rank's Megatron parameter."""
    n, r = layout.tp, at.tp

    def columns(t: Array) -> Array:
        return np.split(t, n, axis=1)[r]

    def vocab(t: Array) -> Array:
        rows = t.shape[0]
        while rows % (n * layout.vocab_divisible_by):
            rows += 1
        padded = np.concatenate([t, np.full((rows - t.shape[0], t.shape[1]), PAD)])
        return np.split(padded, n)[r]

    def qkv(suffix: str) -> Array:
        parts = {x: hf[f"{name}self_attn.{x}_proj.{suffix}"] for x in "qkv"}
        grouped = {x: np.split(t, spec.num_query_groups) for x, t in parts.items()}
        whole = np.concatenate([grouped[x][g] for g in range(spec.num_query_groups) for x in "qkv"])
        return np.split(whole, n)[r]

    def mlp(prefix: str, size: int, rank: int) -> tuple[Array, Array]:
        gate, up = (np.split(hf[f"{prefix}{x}_proj.weight"], size)[rank] for x in ("gate", "up"))
        return np.concatenate([gate, up]), np.split(hf[f"{prefix}down_proj.weight"], size, axis=1)[rank]

    found: dict[tuple[int, str], Array] = {}
    # Interleaved stages: cut the layers into pp * vpp runs, deal them out to the stages in turn.
    runs = np.split(np.arange(spec.num_layers), layout.pp * layout.vpp)
    for chunk, run in enumerate(runs[at.pp :: layout.pp]):
        for local, layer in enumerate(run):
            name, to = f"model.layers.{layer}.", f"decoder.layers.{local}."
            found[chunk, to + "input_layernorm.weight"] = hf[name + "input_layernorm.weight"]
            found[chunk, to + "pre_mlp_layernorm.weight"] = hf[name + "post_attention_layernorm.weight"]
            found[chunk, to + "self_attention.linear_qkv.weight"] = qkv("weight")
            if spec.qkv_bias:
                found[chunk, to + "self_attention.linear_qkv.bias"] = qkv("bias")
            found[chunk, to + "self_attention.linear_proj.weight"] = columns(hf[name + "self_attn.o_proj.weight"])
            if spec.qk_layernorm:
                for x in "qk":
                    found[chunk, to + f"self_attention.{x}_layernorm.weight"] = hf[name + f"self_attn.{x}_norm.weight"]
            if spec.moe_layers[layer]:
                found[chunk, to + "mlp.router.weight"] = hf[name + "mlp.gate.weight"]
                mine = np.split(np.arange(spec.num_experts or 0), layout.ep)[at.ep]
                for index, expert in enumerate(mine):
                    one, two = mlp(f"{name}mlp.experts.{expert}.", layout.etp, at.etp)
                    found[chunk, to + f"mlp.experts.local_experts.{index}.linear_fc1.weight"] = one
                    found[chunk, to + f"mlp.experts.local_experts.{index}.linear_fc2.weight"] = two
            else:
                one, two = mlp(f"{name}mlp.", n, r)
                found[chunk, to + "mlp.linear_fc1.weight"], found[chunk, to + "mlp.linear_fc2.weight"] = one, two
    if at.pp == 0:
        found[0, "embedding.word_embeddings.weight"] = vocab(hf["model.embed_tokens.weight"])
    if at.pp == layout.pp - 1:
        last = layout.vpp - 1
        found[last, "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not spec.tied:
            found[last, "output_layer.weight"] = vocab(hf["lm_head.weight"])
        elif layout.pp > 1:
            found[last, "output_layer.weight"] = vocab(hf["model.embed_tokens.weight"])
    return found
