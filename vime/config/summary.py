"""What a checked run will do, in a few lines: ``vime check`` prints it, and `vime train` before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vime.backends.megatron_utils.checkpoint_directory import CheckpointDirectory
from vime.backends.vllm_utils.command import max_model_len
from vime.config import Config
from vime.config.check import Findings
from vime.config.check_files import checkpoint_step
from vime.config.check_memory import count_parameters, engine_share
from vime.config.machine import size
from vime.models.layout import ParallelLayout


def summary(config: Config, found: Findings) -> str:
    """One line per part of the run. ``found`` has no problems."""
    return "\n".join(f"  {label:<10} {text}" for label, text in _lines(config, found))


def _lines(config: Config, found: Findings) -> Iterator[tuple[str, str]]:
    spec, machine, memory = found.spec, found.machine, found.memory
    assert spec is not None
    assert machine is not None
    assert memory is not None
    sft = config.train.loss_type == "sft_loss"
    total = sum(count_parameters(spec, ParallelLayout(world_size=1)))
    experts = f", {spec.num_experts} experts of which {spec.moe_router_topk}" if spec.num_experts else ""
    yield (
        "model",
        (
            f"{spec.family}, {_count(total)} parameters, {spec.num_layers} layers{experts}, from "
            f"{config.checkpoint.hf_checkpoint}"
        ),
    )
    yield "machine", str(machine)
    layout = ParallelLayout.from_config(config, spec)
    axes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "DP": layout.dp}
    if spec.num_experts:
        axes |= {"EP": layout.ep, "ETP": layout.etp}
    shape = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "DP")
    yield "trainer", f"{layout.world_size} ranks: {shape}; {config.train.loss_type}"
    yield "memory", f"per rank about {memory}"
    if not sft:
        cluster = config.cluster
        where = "on the trainer's GPUs" if cluster.colocate else "on GPUs of their own"
        if cluster.colocate and cluster.num_rollout_gpus > cluster.world_size:
            where += f" and on {cluster.num_rollout_gpus - cluster.world_size} of their own"
        if machine.device == "cpu":
            where = "on the same CPU"
        share = f", {engine_share(config):.0%} of each GPU" if machine.device == "cuda" else ""
        yield (
            "engines",
            (
                f"{cluster.num_engines} x vLLM with {cluster.rollout_num_gpus_per_engine} worker(s) {where}{share}, "
                f"weights {size(memory.engine_weights)} each, context up to {max_model_len(config, spec)} tokens"
            ),
        )
    yield "data", _data(config, found)
    yield "steps", _steps(config, found)
    yield from _checkpoints(config, number_of_rollouts(config, found))


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _data(config: Config, found: Findings) -> str:
    texts = []
    for path, rows in found.rows.items():
        texts.append(f"{path}: {rows.count if rows.all else f'more than {rows.count}'} rows")
    return "; ".join(texts)


def _steps(config: Config, found: Findings) -> str:
    rollouts = number_of_rollouts(config, found)
    length = f"{rollouts} rollouts" if rollouts is not None else f"{config.rollout.num_epoch} epochs"
    per = config.steps_per_rollout
    text = (
        f"{length} of {config.rollout.rollout_batch_size} prompts x {config.rollout.n_samples_per_prompt} answers, "
        f"{per} optimizer step{'s' if per > 1 else ''} each"
    )
    return text + (f": {rollouts * per} in all" if rollouts is not None else "")


def number_of_rollouts(config: Config, found: Findings) -> int | None:
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    rows = found.rows.get(config.data.prompt_data or "")
    if rows is None or not rows.all or config.rollout.num_epoch is None:
        return None
    return config.rollout.num_epoch * rows.count // config.rollout.rollout_batch_size


def _checkpoints(config: Config, rollouts: int | None) -> Iterator[tuple[str, str]]:
    checkpoint = config.checkpoint
    if checkpoint.load:
        step = checkpoint_step(checkpoint.load) if os.path.isdir(checkpoint.load) else None
        damaged = CheckpointDirectory(checkpoint.load).damaged()
        if damaged:
            yield "load", f"{', '.join(damaged)} below {checkpoint.load} is not whole and is passed over"
        if step is None:
            why = "is empty" if os.path.isdir(checkpoint.load) else "does not exist yet"
            yield "load", f"{checkpoint.load} {why}: a fresh start from --hf-checkpoint"
        else:
            done = "; nothing is left to do" if rollouts is not None and step >= rollouts else ""
            yield "load", f"continues after {step} rollouts from {checkpoint.load}{done}"
    if checkpoint.save:
        every = f"every {checkpoint.save_interval} rollouts and " if checkpoint.save_interval else ""
        yield "save", f"{every}after the last, below {checkpoint.save}"
