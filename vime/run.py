"""The parts of one run, put together from the options and taken apart again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.backends.megatron_utils.checkpoint_directory import CheckpointDirectory
from vime.cluster.device import resolve_device
from vime.cluster.engine_group import EngineGroup
from vime.cluster.placement import Placement
from vime.cluster.process import signals_as_exceptions
from vime.cluster.ray_runtime import ray_runtime
from vime.cluster.serving import Serving
from vime.cluster.trainer_group import TrainerGroup
from vime.config import Config
from vime.errors import DataError
from vime.files import claimed
from vime.models.hf_config import read_json
from vime.models.spec import spec_from_hf
from vime.observe.tracker import Tracker, new_run_dir
from vime.rollout.rollout import Rollout

logger = logging.getLogger(__name__)

_ROLLOUT_STATE = "rollout.json"


@dataclass
class Run:
    """Everything that takes part. ``serving`` is None where no engine does (``--loss-type sft_loss``)."""

    config: Config
    tracker: Tracker
    trainer: TrainerGroup
    rollout: Rollout
    serving: Serving | None
    first_rollout: int
    num_rollout: int

    def eval_due(self, rollout_id: int) -> bool:
        every = self.config.eval.eval_interval
        return every is not None and (rollout_id % every == 0 or rollout_id == self.num_rollout)

    def save_due(self, rollout_id: int) -> bool:
        every = self.config.checkpoint.save_interval
        last = rollout_id + 1 == self.num_rollout
        return self.config.checkpoint.save is not None and (
            last or (every is not None and (rollout_id + 1) % every == 0)
        )

    def save(self, rollout_id: int) -> None:
        """Write a checkpoint of everything that the next rollout depends on; it appears whole or not at all."""
        assert self.config.checkpoint.save is not None
        directory = CheckpointDirectory(self.config.checkpoint.save)
        with directory.writing(rollout_id + 1) as folder:
            self.trainer.save(folder)
            (folder / _ROLLOUT_STATE).write_text(json.dumps(self.rollout.state_dict()))
        if self.config.checkpoint.keep_checkpoints:
            directory.prune(self.config.checkpoint.keep_checkpoints)
        if "{rollout_id}" in (self.config.checkpoint.save_hf or ""):
            self.export(rollout_id + 1)

    def export(self, rollout_id: int) -> None:
        """Write the weights for transformers, where ``--save-hf`` asks for it."""
        if self.config.checkpoint.save_hf:
            self.trainer.save_hf(Path(self.config.checkpoint.save_hf.format(rollout_id=rollout_id)))


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Start trainer and engines, continue from a checkpoint if there is one; afterwards stop all of it.

    The stack unwinds in the reverse order, on success as on an error, Ctrl-C or SIGTERM.
    """
    spec = spec_from_hf(config.checkpoint.hf_checkpoint)
    device = resolve_device(config.cluster.device)
    resume = CheckpointDirectory(config.checkpoint.load).newest() if config.checkpoint.load else None
    first_rollout = resume[0] if resume else 0
    run_dir = Path(config.observe.run_dir) if config.observe.run_dir else new_run_dir()
    logs = run_dir.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if config.weight_sync.update_weight_disk_dir is None:
        disk = str(run_dir.absolute() / "weights")
        config = replace(config, weight_sync=replace(config.weight_sync, update_weight_disk_dir=disk))
    with ExitStack() as stack:
        stack.enter_context(signals_as_exceptions())
        stack.enter_context(claimed(run_dir, "--run-dir"))
        if config.checkpoint.save:
            Path(config.checkpoint.save).mkdir(parents=True, exist_ok=True)
            stack.enter_context(claimed(config.checkpoint.save, "--save"))
        # First what needs no engine and fails most often: functions that do not import, prompts that are all too long.
        rollout = Rollout(config, _tokenizer(config))
        stack.callback(rollout.close)
        if resume:
            rollout.load_state_dict(_rollout_state(resume[1]))
        tracker = stack.enter_context(Tracker(config, run_dir, next_step=first_rollout))
        with tracker.phase("start Ray"):
            stack.enter_context(ray_runtime(config, device))
            # Once more: ray.init puts handlers of its own in place, which print a stack of C++ frames.
            stack.enter_context(signals_as_exceptions())
            placement = Placement(config, device)
        with tracker.phase("start trainer"):
            trainer = TrainerGroup(config, spec, placement, device, logs)
            stack.callback(trainer.stop)
        if resume:
            logger.info("continuing after %d rollouts from %s", *resume)
            with tracker.phase("load checkpoint"):
                trainer.load(resume[1])
        serving = None
        if placement.num_engines:
            with tracker.phase("start engines"):
                engines = EngineGroup(config, spec, placement, device, logs)
                stack.callback(engines.stop)
            serving = Serving(config, device, trainer, engines)
            rollout.answer_with(serving)
        yield Run(config, tracker, trainer, rollout, serving, first_rollout, _num_rollout(config, rollout))


def _num_rollout(config: Config, rollout: Rollout) -> int:
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    assert config.rollout.num_epoch is not None  # one of the two is required by the check
    return config.rollout.num_epoch * len(rollout.prompts) // config.rollout.rollout_batch_size


def _tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer  # seconds to import: not before it is needed

    path = config.checkpoint.hf_checkpoint
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # what a damaged file makes transformers and tokenizers raise is anybody's guess
        raise DataError(f"--hf-checkpoint {path}: its tokenizer cannot be read: {error}") from error


def _rollout_state(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / _ROLLOUT_STATE
    state = read_json(file)
    if not isinstance(state.get("prompts"), dict) or "drawn" not in state["prompts"]:
        raise DataError(f"{file} does not say how many prompts were drawn; it is not what --save wrote")
    return state
