"""Which trainer layouts meet which models and engines, and a small part of these that covers every pair of choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec

RANKS = (1, 2, 4, 8)
ENGINES = ("TP1", "two TP1", "TP2")  # one engine of one worker, two at once, one engine of two workers

# What the models have in common: eight layers for eight stages, eight heads for TP8 (vLLM's CPU attention has no heads
# smaller than 32), and a vocabulary that neither side can cut without padding it.
_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 64}

# Model -> family, whether its embeddings are tied, and the rest of its Hugging Face config.
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dense tied": ("qwen3", True, _SHAPE),
    "dense untied": ("qwen3", False, _SHAPE),
    "MoE": ("qwen3_moe", False, _SHAPE | _EXPERTS),
}
# Not in the matrix: vLLM pads experts that are not a multiple of 32 wide on a worker, on a CPU, and cannot update them.
WIDE = "MoE wide"
_WIDE_EXPERTS = _EXPERTS | {"moe_intermediate_size": 256}
OTHER_MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {WIDE: ("qwen3_moe", False, _SHAPE | _WIDE_EXPERTS)}


@dataclass(frozen=True)
class Case:
    """One trainer, synced to one engine set after the other.

    Attributes:
        model: key of MODELS.
        distributed_optimizer: then Megatron has the parameters in buffers of its own, expert and dense ones apart.
        engines: of ENGINES.
        bucketed: whether another connection, which uses the bucketed path alone, follows.
    """

    model: str
    layout: ParallelLayout
    distributed_optimizer: bool
    engines: tuple[str, ...] = ENGINES
    bucketed: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.name}, {' + '.join(self.engines)}"

    @property
    def name(self) -> str:
        """The layout, e.g. "TP2 PP2 VPP2 DP2"; the expert sizes where they are not what Megatron would take."""
        layout, moe = self.layout, self.model.startswith("MoE")
        sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "DP": layout.dp}
        words = [f"{key}{size}" for key, size in sizes.items() if size > 1]
        if moe and layout.ep > 1:
            words.append(f"EP{layout.ep}")
        if moe and layout.etp != layout.tp:
            words.append(f"ETP{layout.etp}")
        return " ".join(words) or "one rank"

    @property
    def id(self) -> str:
        """For the command line: without blanks and commas."""
        return str(self).replace(", ", "-").replace(" ", ".")

    @property
    def options(self) -> dict[str, Any]:
        """The trainer's options: "topic.name" -> value."""
        layout = self.layout
        return {
            "parallel.tensor_model_parallel_size": layout.tp,
            "parallel.pipeline_model_parallel_size": layout.pp,
            "parallel.num_layers_per_virtual_pipeline_stage": (
                _SHAPE["num_hidden_layers"] // (layout.pp * layout.vpp) if layout.vpp > 1 else None
            ),
            "parallel.context_parallel_size": layout.cp,
            "parallel.expert_model_parallel_size": layout.ep,
            "parallel.expert_tensor_parallel_size": layout.etp,
            "parallel.use_distributed_optimizer": self.distributed_optimizer,
            "model.make_vocab_size_divisible_by": layout.vocab_divisible_by,
        }

    def choices(self, engine: str) -> tuple[tuple[str, object], ...]:
        """What is chosen in this case, factor by factor."""
        layout = self.layout
        return (
            ("model", self.model),
            ("engines", engine),
            ("ranks", layout.world_size),
            *((key, getattr(layout, key)) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")),
            ("replicas", layout.dp > 1),  # how many follows from the other sizes
            ("vocabulary", layout.vocab_divisible_by),
            ("optimizer", self.distributed_optimizer),
            ("bucketed", self.bucketed),
        )


def model_spec(model: str) -> ModelSpec:
    """The shape of a model's checkpoints, before there are any."""
    family, tied, shape = MODELS[model]
    layers, experts = shape["num_hidden_layers"], shape.get("num_experts")
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        kv_channels=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        tied=tied,
        qk_layernorm=True,
        qkv_bias=False,
        norm_epsilon=1e-6,
        rotary_base=10000.0,
        max_position_embeddings=shape["max_position_embeddings"],
        dtype="float32",
        num_experts=experts,
        moe_router_topk=2 if experts else None,
        moe_ffn_hidden_size=shape.get("moe_intermediate_size"),
        moe_layers=(bool(experts),) * layers,
        eos_token_ids=(2,),
    )


def layouts(spec: ModelSpec) -> list[ParallelLayout]:
    """Every way to cut the model over 1, 2, 4 and 8 ranks, by powers of two, interleaved in two where it can be."""
    found = []
    for ranks in RANKS:
        sizes = [size for size in RANKS if size <= ranks]
        experts = sizes if spec.num_experts else [1]
        for pp, vpp, cp, tp, ep, etp in itertools.product(sizes, (1, 2), sizes, sizes, experts, experts):
            layout = ParallelLayout(ranks, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp if spec.num_experts else tp)
            if not layout.validate(spec):
                found.append(layout)
    return found


def all_cases() -> list[Case]:
    """The whole matrix. Padding, the optimizer's buffers and the bucketed path alternate over it."""
    found: list[Case] = []
    for model in MODELS:
        for number, layout in enumerate(layouts(model_spec(model))):
            multiple, distributed, bucketed = (1, 128)[number % 2], number // 2 % 2 == 1, number % 3 == 0
            cut = ParallelLayout(**vars(layout) | {"vocab_divisible_by": multiple})
            found.append(Case(model, cut, distributed, bucketed=bucketed))
    return found


def covering(cases: Sequence[Case]) -> list[Case]:
    """Few cases, of one engine set each, that together have every pair of choices of two factors that ``cases`` have.

    Greedy: always the case with the most pairs that are still missing, of those the one with the fewest ranks.
    """
    numbers: dict[tuple[object, object], int] = {}
    candidates = []
    for case, engine in _single(cases):
        mask = 0
        for pair in itertools.combinations(case.choices(engine), 2):
            mask |= 1 << numbers.setdefault(pair, len(numbers))
        candidates.append((case, engine, mask))
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        case, engine, mask = max(
            candidates, key=lambda found: ((found[2] & missing).bit_count(), -found[0].layout.world_size)
        )
        missing &= ~mask
        chosen.append(Case(case.model, case.layout, case.distributed_optimizer, (engine,), case.bucketed))
    return chosen


def _single(cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Every case with every engine set and every value of what merely alternates in the matrix."""
    for case in cases:
        for engine, multiple, distributed, bucketed in itertools.product(
            case.engines, (1, 128), (False, True), (False, True)
        ):
            cut = ParallelLayout(**vars(case.layout) | {"vocab_divisible_by": multiple})
            yield Case(case.model, cut, distributed, (engine,), bucketed), engine
