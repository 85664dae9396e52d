"""Model flags against ``--hf-checkpoint``'s config.json."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vime.config import Config
from vime.config.flags import flags, is_given, value_of
from vime.models.spec import ModelSpec, disagreements


def check_model(config: Config, spec: ModelSpec) -> list[str]:
    """What the model flags say differently from the checkpoint, both values named."""
    where = f"(--hf-checkpoint {config.checkpoint.hf_checkpoint})"
    differing = disagreements(spec, config.model, config.given)
    problems = [f"{problem} {where}" for problem in differing]
    if "attention_softmax_in_fp32" in config.given and not config.model.attention_softmax_in_fp32:
        problems.append(
            "--attention-softmax-in-fp32 false: attention probabilities are always in fp32 here; leave it out"
        )
    return [*problems, *_experts(config, spec), *_layer_pattern(config, spec)]


def _experts(config: Config, spec: ModelSpec) -> Iterator[str]:
    if spec.num_experts:
        return
    # those with a size are in disagreements() already
    compared = ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_layer_freq")
    for name, flag in flags().items():
        if not name.startswith("moe_") or name in compared or not is_given(config, name):
            continue
        value = value_of(config, name)
        if value is not False:
            written = flag.text if value is True else f"{flag.text} {value}"
            yield f"{written} means nothing: {config.checkpoint.hf_checkpoint} has no experts; leave it out"


def _layer_pattern(config: Config, spec: ModelSpec) -> Iterator[str]:
    said = config.model.moe_layer_freq
    if said is None:
        return
    pattern = layer_pattern(said, spec.num_layers)
    if pattern is None:
        yield f"--moe-layer-freq {said}: must be a number n (every n-th layer) or a list of 0 and 1, as in [0]*1+[1]*47"
    elif pattern != spec.moe_layers:
        have = [index for index, experts in enumerate(spec.moe_layers) if experts]
        yield (
            f"--moe-layer-freq {said} puts experts in {sum(pattern)} of {len(pattern)} layers, but the checkpoint has "
            f"them in {len(have)} of {spec.num_layers}"
        )


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...] | None:
    """Megatron's ``--moe-layer-freq``: an n for every n-th layer, or a list such as ``[0]*3+[1]*45``."""
    try:
        value = _evaluate(ast.parse(text.replace(" ", ""), mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    if isinstance(value, int):
        return tuple(index % value == 0 for index in range(num_layers)) if value > 0 else None
    return tuple(bool(item) for item in value)


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if all(item in (0, 1) for item in items):
            return items  # type: ignore[return-value]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 10_000:
            return left * right
    raise ValueError("not a layer pattern")
