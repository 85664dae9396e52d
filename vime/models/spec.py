"""The shape of a model, read from its Hugging Face directory. Needs neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import DataError
from vime.models.hf_config import HFConfig

if TYPE_CHECKING:
    from vime.config.model import ModelOptions


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model's shape that trainer, weight sync and checks need. Sizes are of the whole model."""

    family: str  # Hugging Face's model_type
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # width of a dense MLP; in a MoE model, of its dense layers
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # size of one head
    vocab_size: int  # rows of the checkpoint's embedding, before padding
    tied: bool  # the output layer is the embedding
    qk_layernorm: bool
    qkv_bias: bool
    norm_epsilon: float
    rotary_base: float
    max_position_embeddings: int
    dtype: str  # of the checkpoint: "bfloat16", "float16", "float32"
    num_experts: int | None = None  # None: dense
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    norm_topk_prob: bool = True  # the weights of the chosen experts sum to one
    moe_layers: tuple[bool, ...] = ()  # per layer: has experts. Filled with False where left out
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (False,) * self.num_layers)
        if len(self.moe_layers) != self.num_layers:
            raise ValueError(f"moe_layers has {len(self.moe_layers)} entries for {self.num_layers} layers")

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    def padded_vocab_size(self, tp: int, divisible_by: int = 1) -> int:
        """Rows of Megatron's embedding: the vocabulary rounded up to a multiple of ``tp * divisible_by``."""
        multiple = tp * divisible_by
        return -(-self.vocab_size // multiple) * multiple

    def replace(self, **changes: object) -> ModelSpec:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def spec_from_hf(path: str | Path) -> ModelSpec:
    """Read the model's shape from the ``config.json`` (transformers 4 or 5) in a Hugging Face directory.

    Raises:
        DataError: no such directory or file, an entry that is missing or not a size, or a feature that vime does not
            implement (each is named).
    """
    from vime.models import FAMILIES  # the families import this module

    config = HFConfig(path)
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise DataError(f"{config.path}: model_type {config.model_type!r} is not implemented (implemented: {known})")
    spec = family.read(config)
    if config.get("quantization_config", default=None):
        config.refuse("a quantised checkpoint (quantization_config); train from the unquantised one")
    config.refuse_unless("hidden_act", "silu")
    if spec.dtype not in ("bfloat16", "float16", "float32"):
        config.refuse(f"weights of dtype {spec.dtype!r} (implemented: bfloat16, float16, float32)")
    if spec.num_attention_heads % spec.num_query_groups:
        config.refuse(f"{spec.num_attention_heads} attention heads over {spec.num_query_groups} key/value heads")
    if config.problems:
        raise DataError(f"{config.path} asks for what vime does not implement: " + "; ".join(config.problems))
    return spec


def disagreements(spec: ModelSpec, options: ModelOptions, given: Container[str] = ()) -> list[str]:
    """What the model flags say differently from the checkpoint; each entry names both values.

    A flag that was left out says nothing: None, or False for a switch unless its name is in ``given``.
    """
    sizes = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "vocab_size": spec.vocab_size,
        "norm_epsilon": spec.norm_epsilon,
        "rotary_base": spec.rotary_base,
        "num_experts": spec.num_experts,
        "moe_router_topk": spec.moe_router_topk,
        "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
    }
    found = []
    for name, ours in sizes.items():
        said = getattr(options, name)
        if said is None or (ours is not None and math.isclose(said, ours, rel_tol=1e-9)):
            continue
        found.append((_flag(name, said), str(ours) if ours is not None else "none (it is a dense model)"))
    shares = spec.num_query_groups < spec.num_attention_heads
    normalised = "weights normalised over the chosen experts (norm_topk_prob)" if spec.num_experts else "a dense model"
    switches = {  # what the model has; how it is said where it has not, and where it has
        "qk_layernorm": (spec.qk_layernorm, "no norm on queries and keys", "a norm on queries and keys"),
        "add_qkv_bias": (spec.qkv_bias, "no bias in the QKV projection", "a bias in the QKV projection"),
        "untie_embeddings_and_output_weights": (
            not spec.tied,
            "tied embeddings (tie_word_embeddings)",
            "an output layer of its own (tie_word_embeddings)",
        ),
        "moe_router_pre_softmax": (
            spec.num_experts is not None and not spec.norm_topk_prob,
            normalised,
            "weights that are not normalised over the chosen experts (norm_topk_prob)",
        ),
        # --group-query-attention with --num-query-groups: that number is compared above
        "group_query_attention": (
            shares or (options.group_query_attention and options.num_query_groups is not None),
            "one key/value head per query head",
            f"{spec.num_query_groups} key/value heads for {spec.num_attention_heads} query heads",
        ),
        # so in every family that vime implements
        "swiglu": (True, "", "a gated SiLU MLP"),
        "disable_bias_linear": (True, "", "no bias in linear layers"),
        "use_rotary_position_embeddings": (True, "", "a rotary position embedding"),
    }
    for name, (has, without, having) in switches.items():
        if getattr(options, name):
            if not has:
                found.append((_flag(name, True), without))
        elif name in given and has:
            found.append((_flag(name, "false"), having))
    return [f"{flag}, but the checkpoint has {theirs}" for flag, theirs in found]


def _flag(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"
