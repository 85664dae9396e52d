"""Where every checkpoint tensor lies in the trainer's ranks, by arithmetic alone: no torch, Megatron or communication.

Ranks are numbered in Megatron's default order "tp-cp-ep-dp-pp", the first varying fastest: attention and dense layers
by (tp, cp, dp, pp), experts by (etp, ep, edp, pp). Stage p's chunk v holds the layers from (v * pp + p) * n on, where
n = num_layers / (pp * vpp). CP and DP ranks hold replicas. How a parameter is put together: vime/models/family.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.errors import ConfigError
from vime.models import FAMILIES
from vime.models.family import Rule, Shape, embedding_rule, final_norm_rule, output_rule
from vime.models.spec import ModelSpec

if TYPE_CHECKING:
    from vime.config import Config

Box = tuple[tuple[int, int], ...]  # [start, stop) per dimension


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in each kind of parallelism. ``dp``: among the data parallel replicas without CP."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor, and where a rank's Megatron parameter holds it."""

    tensor: str  # Hugging Face name
    box: Box  # in the checkpoint tensor
    chunk: int  # which of the stage's model chunks (0 without interleaving)
    param: str  # the parameter's name inside that chunk
    offset: int  # of the box's first element from the parameter's first, in elements
    strides: tuple[int, ...]  # in elements, one per dimension of the box; the parameter is contiguous

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        count = 1
        for start, stop in self.box:
            count *= stop - start
        return count

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the checkpoint tensor."""
        return tuple(slice(start, stop) for start, stop in self.box)

    def view(self, parameter: Any) -> Any:
        """The box as a view into ``parameter``, a contiguous torch tensor: writing to it writes the parameter."""
        if not parameter.is_contiguous():
            raise ValueError(f"{self.param} is not contiguous: strides {tuple(parameter.stride())}")
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the trainer's parallelism."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks per pipeline stage; 1: not interleaved
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vocab_divisible_by: int = 1

    @staticmethod
    def from_config(config: Config, spec: ModelSpec) -> ParallelLayout:
        """Raises ConfigError where the layers per interleaved stage do not divide a stage's layers; whatever else can
        be wrong is :meth:`validate`'s to say."""
        parallel = config.parallel
        pp, per_chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
        vpp = 1
        if per_chunk is not None:
            vpp, rest = divmod(spec.num_layers, pp * per_chunk)
            if rest or not vpp:
                raise ConfigError(
                    [
                        f"{spec.num_layers} layers do not divide into pipeline stages "
                        f"(--pipeline-model-parallel-size {pp}) of whole chunks of {per_chunk} layers "
                        "(--num-layers-per-virtual-pipeline-stage)"
                    ]
                )
        tp = parallel.tensor_model_parallel_size
        return ParallelLayout(
            world_size=config.cluster.world_size,
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size or tp,
            vocab_divisible_by=config.model.make_vocab_size_divisible_by,
        )

    @property
    def dp(self) -> int:
        """Data parallel replicas of the attention and dense layers."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        _, edp = divmod(rest, self.edp)
        return Coordinates(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp, edp=edp)

    def layers(self, spec: ModelSpec, stage: int, chunk: int) -> range:
        """Global numbers of the layers in a stage's model chunk."""
        count = spec.num_layers // (self.pp * self.vpp)
        first = (chunk * self.pp + stage) * count
        return range(first, first + count)

    def experts(self, spec: ModelSpec, ep_rank: int) -> range:
        """Global numbers of the experts on an expert parallel rank."""
        count = (spec.num_experts or 0) // self.ep
        return range(ep_rank * count, (ep_rank + 1) * count)

    def validate(self, spec: ModelSpec) -> list[str]:
        """Every reason why this model cannot be cut this way; each names the sizes."""
        problems = []

        def divides(parts: int, whole: int, what: str, by: str) -> None:
            if whole % parts:
                problems.append(f"{what} ({whole}) is not divisible by {by} ({parts})")

        tp, ep, etp = "--tensor-model-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"
        pp, cp = "--pipeline-model-parallel-size", "--context-parallel-size"
        divides(self.tp * self.pp * self.cp, self.world_size, "number of trainer ranks", f"{tp} x {pp} x {cp}")
        divides(self.tp, spec.num_attention_heads, "number of attention heads", tp)
        divides(self.tp, spec.num_query_groups, "number of key/value heads", tp)
        if not all(spec.moe_layers):
            divides(self.tp, spec.ffn_hidden_size, "width of the dense MLP", tp)
        if self.vpp > 1 and self.pp == 1:
            problems.append(f"interleaved stages (--num-layers-per-virtual-pipeline-stage) need {pp} above 1")
        chunks = f"{pp} x chunks per stage" if self.vpp > 1 else pp
        divides(self.pp * self.vpp, spec.num_layers, "number of layers", chunks)
        if spec.num_experts is not None and spec.moe_ffn_hidden_size is not None:
            divides(self.etp * self.ep * self.pp, self.world_size, "number of trainer ranks", f"{etp} x {ep} x {pp}")
            divides(self.ep, spec.num_experts, "number of experts", ep)
            divides(self.etp, spec.moe_ffn_hidden_size, "width of one expert", etp)
        else:
            if self.ep > 1:
                problems.append(f"{ep} {self.ep} means nothing: the model has no experts")
            if self.etp not in (1, self.tp):
                problems.append(f"{etp} {self.etp} means nothing: the model has no experts")
        return problems


def pieces(spec: ModelSpec, layout: ParallelLayout, rank: int) -> list[Piece]:
    """Every box of every checkpoint tensor that ``rank`` holds, in the order of its parameters.

    Replicas are listed by each of their holders. Padded vocabulary rows are in no box. ``layout`` must be one that
    :meth:`ParallelLayout.validate` finds nothing wrong with.
    """
    found = []
    segments: dict[str, list[tuple[int, Box, int, tuple[int, ...]]]] = {}
    for chunk, param, rule, layer, expert in _parameters(spec, layout, rank):
        cut = segments.get(rule.param)  # the arithmetic is the same in every layer
        if cut is None:
            cut = segments[rule.param] = _segments(rule, spec, layout, layout.coordinates(rank))
        names = [name.format(layer=layer, expert=expert) for name, _ in rule.tensors]
        for index, box, offset, strides in cut:
            found.append(Piece(names[index], box, chunk, param, offset, strides))
    return found


def parameter_shapes(spec: ModelSpec, layout: ParallelLayout, rank: int) -> dict[tuple[int, str], Shape]:
    """(chunk, name) -> shape of every Megatron parameter on ``rank``, padding included."""
    at = layout.coordinates(rank)
    return {
        (chunk, param): _local_shape(rule, layout, at) for chunk, param, rule, _, _ in _parameters(spec, layout, rank)
    }


def checkpoint_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name -> shape of every tensor in the checkpoint (tied: without lm_head)."""
    whole = ParallelLayout(world_size=1)
    found: dict[str, Shape] = {}
    for _, _, rule, layer, expert in _parameters(spec, whole, 0):
        for name, shape in rule.tensors:
            found[name.format(layer=layer, expert=expert)] = shape
    return found


def _parameters(spec: ModelSpec, layout: ParallelLayout, rank: int) -> Iterator[tuple[int, str, Rule, int, int]]:
    """(chunk, parameter name, rule, global layer, global expert) of every parameter on ``rank``."""
    at = layout.coordinates(rank)
    family = FAMILIES[spec.family]
    rules = {moe: family.layer_rules(spec, moe) for moe in sorted(set(spec.moe_layers))}
    experts = layout.experts(spec, at.ep)
    last_chunk = layout.vpp - 1
    if at.pp == 0:
        rule = embedding_rule(spec)
        yield 0, rule.param, rule, 0, 0
    for chunk in range(layout.vpp):
        for local, layer in enumerate(layout.layers(spec, at.pp, chunk)):
            for rule in rules[spec.moe_layers[layer]]:
                if rule.is_expert:
                    for index, expert in enumerate(experts):
                        yield chunk, rule.param.format(layer=local, expert=index), rule, layer, expert
                else:
                    yield chunk, rule.param.format(layer=local), rule, layer, 0
    if at.pp == layout.pp - 1:
        rule = final_norm_rule(spec)
        yield last_chunk, rule.param, rule, 0, 0
        if not (spec.tied and layout.pp == 1):  # a tied model of one stage computes logits with the embedding itself
            rule = output_rule(spec)
            yield last_chunk, rule.param, rule, 0, 0


def _cut(rule: Rule, layout: ParallelLayout, at: Coordinates) -> tuple[int, int]:
    """(rank, size) of the tensor parallel group that cuts this parameter."""
    return (at.etp, layout.etp) if rule.is_expert else (at.tp, layout.tp)


def _segments(
    rule: Rule, spec: ModelSpec, layout: ParallelLayout, at: Coordinates
) -> list[tuple[int, Box, int, tuple[int, ...]]]:
    """(index in rule.tensors, box, offset, strides) of each box in this rank's part of the parameter."""
    r, n = _cut(rule, layout, at)
    shape = rule.tensors[0][1]
    columns = shape[1] if len(shape) == 2 else 1
    strides = (columns, 1)[: len(shape)]
    whole = tuple((0, size) for size in shape)

    if rule.kind == "replicated":
        return [(0, whole, 0, strides)]
    if rule.kind == "row":
        width = columns // n
        return [(0, (whole[0], (r * width, (r + 1) * width)), 0, (width, 1))]
    if rule.kind == "gated":
        height = shape[0] // n
        rows = (r * height, (r + 1) * height)
        return [(index, (rows, *whole[1:]), index * height * columns, strides) for index in range(2)]
    if rule.kind == "vocab":
        height = spec.padded_vocab_size(n, layout.vocab_divisible_by) // n
        start, stop = r * height, min((r + 1) * height, spec.vocab_size)
        return [(0, ((start, stop), *whole[1:]), 0, strides)] if start < stop else []
    assert rule.kind == "qkv", rule.kind
    found = []
    d, q = spec.kv_channels, spec.heads_per_group * spec.kv_channels  # rows of a group's k or v, and of its queries
    groups = spec.num_query_groups // n
    for local in range(groups):
        group, first = r * groups + local, local * (q + 2 * d)
        for index, rows, row in ((0, q, first), (1, d, first + q), (2, d, first + q + d)):
            box = ((group * rows, (group + 1) * rows), *whole[1:])
            found.append((index, box, row * columns, strides))
    return found


def _local_shape(rule: Rule, layout: ParallelLayout, at: Coordinates) -> Shape:
    _, n = _cut(rule, layout, at)
    shapes = [shape for _, shape in rule.tensors]
    if rule.kind == "row":
        return (shapes[0][0], shapes[0][1] // n)
    rows = sum(shape[0] for shape in shapes)
    if rule.kind == "vocab":
        multiple = n * layout.vocab_divisible_by
        rows = -(-rows // multiple) * multiple
    return (rows if rule.kind == "replicated" else rows // n, *shapes[0][1:])
