"""Weights, optimizer, learning rate schedule and random states of the trainer, in Megatron's torch_dist format.

The weights and the optimizer's state are stored by global tensor, so a run may continue with another parallel layout;
random states belong to one layout. The folder around it, and that it appears whole or not at all, is
checkpoint_directory.py's matter. Every function here is collective over all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()  # before Megatron

from megatron.core import dist_checkpointing, tensor_parallel  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.serialization import load_common_state_dict  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from vime.backends.megatron_utils.checkpoint_directory import torch_dist_checkpoint  # noqa: E402
from vime.backends.megatron_utils.megatron_fixes import unshare_adam_steps  # noqa: E402
from vime.backends.megatron_utils.torch_dist_writer import TorchDistWriter  # noqa: E402
from vime.errors import DataError  # noqa: E402
from vime.models.layout import ParallelLayout  # noqa: E402
from vime.models.spec import ModelSpec  # noqa: E402
from vime.observe.progress import Progress  # noqa: E402

FORMAT = 1
_FULL = 1 << 20  # bytes left on a disk that is full
_SAME_MODEL = ("eos_token_ids", "dtype", "max_position_embeddings")  # entries of a spec that weights do not depend on
logger = logging.getLogger(__name__)


def save_checkpoint(
    directory: str | Path,
    chunks: Sequence[Any],
    optimizer: Any | None,
    scheduler: Any | None,
    *,
    spec: ModelSpec,
    layout: ParallelLayout,
) -> None:
    """Write into ``directory``, which exists and is empty.

    Args:
        chunks: this rank's model chunks, wrapped in Megatron's DistributedDataParallel or not.
        optimizer: Megatron's optimizer, its state on the device; None leaves it out.
        scheduler: Megatron's OptimizerParamScheduler; None leaves it out.
    """
    metadata = _metadata(optimizer)
    with (
        _shown("save checkpoint"),
        cpu_compat.cpu_for_cuda(),
        _as_data_error(f"cannot write a checkpoint to {directory}", directory),
    ):
        state = _model_state(chunks, metadata)
        if optimizer is not None:
            state["optimizer"] = _optimizer_state(optimizer, state, metadata, loading=False)
        state["vime"] = {
            "format": FORMAT,
            "spec": _plain(spec),
            "layout": _plain(layout) | {"cuda": torch.cuda.is_available()},
            "has_optimizer": optimizer is not None,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }
        state["rng"] = _rng_object(_rng_state())
        content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
        dist_checkpointing.save(state, str(directory), TorchDistWriter(), content_metadata=content)
        dist.barrier()


def load_checkpoint(
    directory: str | Path,
    chunks: Sequence[Any],
    optimizer: Any | None,
    scheduler: Any | None,
    *,
    spec: ModelSpec,
    layout: ParallelLayout,
) -> None:
    """Restore what :func:`save_checkpoint` wrote; training then continues bit for bit in the same layout.

    With ``optimizer`` or ``scheduler`` None, those stay out; give the optimizer to :func:`follow_weights` then. The
    optimizer's settings (betas, weight decay, ...) stay those of this run; only its state is restored. Random states
    are restored only in the layout that wrote them.

    Raises:
        DataError: not a checkpoint of vime, of another model, without an optimizer, or one that cannot be read.
    """
    ours = _common(directory).get("vime")
    if ours is None:
        raise DataError(f"{directory} is a Megatron checkpoint that vime did not write; give it as --ref-load")
    if ours["format"] != FORMAT:
        raise DataError(f"{directory} has format {ours['format']}, this vime reads format {FORMAT}")
    _check_same_model(directory, ours["spec"], spec)
    if optimizer is not None and not ours["has_optimizer"]:
        raise DataError(f"{directory} was saved without the optimizer (--no-save-optim): add --no-load-optim")
    same_layout = ours["layout"] == _plain(layout) | {"cuda": torch.cuda.is_available()}
    metadata = _metadata(optimizer)
    with _shown("load checkpoint"), cpu_compat.cpu_for_cuda(), _as_data_error(f"cannot load {directory}"):
        state = _model_state(chunks, metadata)
        if optimizer is not None:
            state["optimizer"] = _optimizer_state(optimizer, state, metadata, loading=True)
        if same_layout:
            state["rng"] = _rng_object(None)
        loaded: Any = dist_checkpointing.load(state, str(directory))
        _restore_model(chunks, loaded)
        if optimizer is not None:
            with _settings_kept(optimizer):
                optimizer.load_state_dict(loaded["optimizer"])
            unshare_adam_steps(optimizer)
        if scheduler is not None and ours["scheduler"] is not None:
            scheduler.num_steps = 0  # Megatron adds the checkpoint's steps to those already done
            scheduler.load_state_dict(ours["scheduler"])
        if same_layout:
            _set_rng_state(loaded["rng"])
        elif dist.get_rank() == 0:
            logger.info("%s was written with another parallel layout; random states start from --seed", directory)
        dist.barrier()


def load_model_weights(path: str | Path, chunks: Sequence[Any], spec: ModelSpec | None = None) -> None:
    """Restore only the weights (``--ref-load``).

    Args:
        path: a torch_dist checkpoint, of vime or of Megatron-LM, or a folder of checkpoints (its newest is taken).
        spec: the model's shape; with it, another model's checkpoint is refused by name.
    """
    directory = torch_dist_checkpoint(path)
    if directory is None:
        raise DataError(f"{path} is neither a Hugging Face directory nor a Megatron torch_dist checkpoint")
    ours = _common(directory).get("vime")
    if ours is not None and spec is not None:
        _check_same_model(directory, ours["spec"], spec)
    with _shown("load weights"), cpu_compat.cpu_for_cuda(), _as_data_error(f"cannot load the weights in {directory}"):
        loaded: Any = dist_checkpointing.load(_model_state(chunks, _metadata(None)), str(directory))
        _restore_model(chunks, loaded)
        dist.barrier()


def follow_weights(optimizer: Any) -> None:
    """After weights were loaded without the optimizer: its fp32 master copies become the weights again."""
    with cpu_compat.cpu_for_cuda():
        optimizer.reload_model_params()


def _metadata(optimizer: Any | None) -> dict[str, Any]:
    """What Megatron's sharded state dicts are told about the format."""
    return {
        # The only one of Megatron's formats that loads right without TransformerEngine (facts in megatron_fixes.py).
        "distrib_optim_sharding_type": "fully_reshardable",
        # Gathers over Gloo to one rank per model parallel group. Otherwise every data parallel rank holds all of the
        # optimizer's state in host memory at once.
        "distrib_optim_fully_reshardable_mem_efficient": optimizer is not None,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(chunks: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron-LM's keys: "model", or "model0", "model1", ... where stages are interleaved."""
    return {key: _bare(chunk).sharded_state_dict(metadata=metadata) for key, chunk in _keyed(chunks)}


def _restore_model(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    for key, chunk in _keyed(chunks):
        _bare(chunk).load_state_dict(loaded[key], strict=True)


def _keyed(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("model" if len(chunks) == 1 else f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def _bare(chunk: Any) -> Any:
    return getattr(chunk, "module", chunk)


def _optimizer_state(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    _create_adam_state(optimizer)
    models = {key: model_state[key] for key in model_state if key.startswith("model")}
    state = optimizer.sharded_state_dict(models.get("model", models), is_loading=loading, metadata=metadata)
    for part in (state, *state.values()):  # of a chained optimizer: by number
        if not isinstance(part, dict):
            continue
        if part.get("param_state", ...) is None:
            del part["param_state"]  # gathered elsewhere; Megatron would warn that ranks differ in it
        adam = part.get("optimizer", part).get("state")
        if isinstance(adam, dict) and adam:
            adam.setdefault("common_step", torch.zeros(()))  # Megatron forgets the step where it is 0
    return state


def _create_adam_state(optimizer: Any) -> None:
    """Give each parameter the state that torch's Adam makes in its first step: Megatron reads it before that."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                    part.optimizer.state[parameter].update(
                        step=step,
                        exp_avg=torch.zeros_like(parameter.data),
                        exp_avg_sq=torch.zeros_like(parameter.data),
                    )


@contextmanager
def _settings_kept(optimizer: Any) -> Iterator[None]:
    """Loading an optimizer also loads its settings; those follow this run's flags (and its device) instead."""
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    before = [[dict(group) for group in part.optimizer.param_groups] for part in parts]
    yield
    for part, groups in zip(parts, before, strict=True):
        for group, old in zip(part.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in old.items() if key not in ("params", "step")})


def _rng_state() -> dict[str, Any]:
    """Of this process; plain numbers and tensors, which load without unpickling classes."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.tensor(keys.astype("int64")), position, has_gauss, gauss),  # pyright: ignore
        "torch": torch.get_rng_state(),
        "megatron": {name: value.cpu() for name, value in _tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _rng_object(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _common(directory: str | Path) -> dict[str, Any]:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise DataError(f"{directory} is not a torch_dist checkpoint (it has no metadata.json)")
    with _as_data_error(f"cannot read {directory}"):
        return load_common_state_dict(str(directory))


def _check_same_model(directory: str | Path, saved: dict[str, Any], spec: ModelSpec) -> None:
    now = _plain(spec)
    differ = [
        f"{name}: {saved.get(name)} there, {now[name]} here"
        for name in now
        if name not in _SAME_MODEL and saved.get(name) != now[name]
    ]
    if differ:
        raise DataError(f"{directory} is a checkpoint of another model ({'; '.join(differ)})")


def _plain(value: Any) -> dict[str, Any]:
    return {name: list(item) if isinstance(item, tuple) else item for name, item in dataclasses.asdict(value).items()}


@contextmanager
def _shown(label: str) -> Iterator[None]:
    if dist.get_rank() != 0:
        yield
        return
    with Progress(label):
        yield


@contextmanager
def _as_data_error(what: str, written: str | Path | None = None) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, CheckpointException, OSError, KeyError, ValueError) as error:
        logger.info("%s", what, exc_info=error)  # into the rank's log; the message says what it comes down to
        why = _root(error)
        if written is not None and "No space left" not in why and shutil.disk_usage(written).free < _FULL:
            why = f"No space left on device ({why})"  # torch's writer has a complaint of its own
        raise DataError(f"{what}: {why}") from error


def _root(error: BaseException) -> str:
    """What an error comes down to: torch's says which ranks failed and carries all their stacks."""
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        number, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        rank = f"rank {number}: "
    chain: list[BaseException] = []
    deeper: BaseException | None = error
    while deeper is not None and deeper not in chain:
        chain.append(deeper)
        deeper = deeper.__cause__ or deeper.__context__
    system = next((one for one in chain if isinstance(one, OSError)), error)
    return f"{rank}{type(system).__name__}: {system}"
