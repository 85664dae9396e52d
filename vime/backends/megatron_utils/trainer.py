"""One rank of the trainer: a Megatron model that learns from rollouts."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()  # before anything imports Megatron

from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging  # noqa: E402

from vime.algorithms import compute_advantages, kl_estimate  # noqa: E402
from vime.backends.megatron_utils import megatron_fixes, memory, parallel  # noqa: E402
from vime.backends.megatron_utils.batch_check import check_batch  # noqa: E402
from vime.backends.megatron_utils.checkpoint import (  # noqa: E402
    follow_weights,
    load_checkpoint,
    load_model_weights,
    save_checkpoint,
)
from vime.backends.megatron_utils.forward import Forward, Rows  # noqa: E402
from vime.backends.megatron_utils.hf_weights import export_hf_weights, load_hf_weights  # noqa: E402
from vime.backends.megatron_utils.loss import ResponseTokens, learning_loss, metric_names, token_weights  # noqa: E402
from vime.backends.megatron_utils.lr_schedule import build_schedule  # noqa: E402
from vime.backends.megatron_utils.model_provider import build_chunks, compute_dtype, transformer_config  # noqa: E402
from vime.backends.megatron_utils.optimizer import build_optimizer, guarded_step, wrap_chunks  # noqa: E402
from vime.backends.megatron_utils.packing import MicroBatch  # noqa: E402
from vime.config import Config  # noqa: E402
from vime.errors import DataError, TrainerError  # noqa: E402
from vime.models.layout import ParallelLayout, pieces  # noqa: E402
from vime.models.spec import ModelSpec  # noqa: E402
from vime.observe.progress import Progress  # noqa: E402
from vime.types import EngineAddress, TrainBatch  # noqa: E402
from vime.weight_sync.arena import allocate as allocate_shared  # noqa: E402

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)


def _on_device(method: Callable[Concatenate[MegatronTrainer, P], R]) -> Callable[Concatenate[MegatronTrainer, P], R]:
    """Enter cpu_compat's mode, which belongs to a thread: callers may use another one for each call."""

    @functools.wraps(method)
    def wrapped(self: MegatronTrainer, *args: P.args, **kwargs: P.kwargs) -> R:
        with cpu_compat.cpu_for_cuda():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return method(self, *args, **kwargs)

    return wrapped


class MegatronTrainer:
    """Every method is collective: all ranks call it, with the same arguments.

    Attributes:
        named_params: (model chunk, Megatron's name in it) -> parameter. Identities never change.
        arenas: the flat buffers that hold all of them; the optimizer writes there in place.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        *,
        rank: int,
        world_size: int,
        store: Any = None,
        device: str = "cpu",
        local_rank: int = 0,
    ) -> None:
        """Form the process group at ``store`` (torch's; None where there is one), build the model, and load the weights
        of --hf-checkpoint (and --ref-load)."""
        self.config, self.spec, self.rank = config, spec, rank
        self.device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
        self.dtype = compute_dtype(config, self.device)
        self.layout = ParallelLayout.from_config(config, spec)
        self._engines: Any = None
        self._policy: memory.WeightCopy | None = None
        self._told_nothing_to_move = False
        self._build(world_size, store)

    @_on_device
    def _build(self, world_size: int, store: Any) -> None:
        config, spec = self.config, self.spec
        megatron_fixes.apply()
        self._owns_process_group = not torch.distributed.is_initialized()
        self.groups = parallel.initialize(
            config, self.layout, rank=self.rank, world_size=world_size, store=store, device=self.device
        )
        self.megatron = transformer_config(config, spec, self.layout, self.device)
        chunks = build_chunks(config, spec, self.layout, self.megatron)
        for chunk in chunks:
            chunk.to(self.device)
        self.ddp = wrap_chunks(config, self.megatron, chunks)
        self.named_params = {
            (index, name): parameter
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        self.arenas = memory.flatten_parameters(self.named_params, self.ddp, self._allocate)
        self._reference = self._load_reference()
        load_hf_weights(config.checkpoint.hf_checkpoint, self._data(), pieces(spec, self.layout, self.rank))
        self.optimizer = build_optimizer(config, self.dtype, self.device, self.ddp)
        self.schedule = build_schedule(config, self.optimizer)
        self._forward = Forward(config, spec, self.layout, self.groups, self.megatron, self.ddp, self.device)
        self._movable, self._movable_weights = memory.Movable(), memory.Movable()
        for ddp in self.ddp:
            ddp.train()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return allocate_shared(num_bytes)

    def _data(self) -> dict[memory.Key, torch.Tensor]:
        return {key: parameter.data for key, parameter in self.named_params.items()}

    def _load_reference(self) -> memory.WeightCopy | None:
        """The reference model's weights on the host, read through the parameters."""
        options = self.config.algorithm
        learns_policy = self.config.train.loss_type == "policy_loss"
        if not learns_policy or not (options.use_kl_loss or options.kl_coef):
            return None
        path = self.config.checkpoint.ref_load or self.config.checkpoint.hf_checkpoint
        if (Path(path) / "config.json").exists():
            load_hf_weights(path, self._data(), pieces(self.spec, self.layout, self.rank), self.spec)
        else:
            load_model_weights(path, self.ddp, self.spec)
        copy = memory.WeightCopy(self.arenas)
        copy.take()
        return copy

    # ------------------------------------------------------------------ learning

    @_on_device
    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Learn from one rollout: one optimizer step per --global-batch-size answers, in the batch's order.

        Returns:
            The rollout's metrics (train/...), averaged over its optimizer steps; the same on every rank.

        Raises:
            DataError: an answer without a prompt token, or lists that do not fit together.
            TrainerError: a loss or gradient that is not finite; the weights are those before that step.
        """
        check_batch(batch)
        if self._movable.is_away or self._movable_weights.is_away:
            raise TrainerError(f"rollout {rollout_id}: train() was called between offload() and onload()")
        size = self.config.global_batch_size
        answers = range(len(batch.tokens))
        steps = [answers[start : start + size] for start in range(0, len(answers), size)]
        offsets = [0, *itertools.accumulate(batch.response_lengths)]
        rows = [self._forward.micro_batches(batch, step, offsets) for step in steps]
        data = self._response_tokens(batch, steps)
        ours = self._log_probs_before(batch, steps, rows, offsets, data)
        first_pass = torch.zeros_like(data.loss_mask) if ours is None else None
        metrics: dict[str, float] = {}
        shown = Progress("train", len(rows), "optimizer steps") if self.rank == 0 else nullcontext()
        with shown as progress:
            for number, step_rows in enumerate(rows):
                what = f"rollout {rollout_id}, optimizer step {number + 1} of {len(rows)}"
                for name, value in self._step(step_rows, data, what, first_pass if number == 0 else None).items():
                    metrics[name] = metrics.get(name, 0.0) + value / len(rows)
                if progress is not None:
                    progress.update(1)
        if self.config.parallel.overlap_param_gather:
            for ddp in self.ddp:  # otherwise the next forward pass would gather them: too late for the engines
                ddp.start_param_sync(force_sync=True)
        if data.rollout_log_probs is not None:
            mask = data.loss_mask.clone()
            if first_pass is not None:
                ours = parallel.sum_over_tokens(first_pass, self.groups)
                mask[offsets[len(steps[0])] :] = 0  # later steps' log-probs are of changed weights
            difference = (cast(torch.Tensor, ours) - data.rollout_log_probs).abs() * mask
            metrics["logprob_abs_diff"] = (difference.double().sum() / mask.sum().clamp(min=1)).item()
            metrics["logprob_abs_diff_max"] = difference.max().item() if len(difference) else 0.0
        return {f"train/{name}": value for name, value in metrics.items()}

    def _response_tokens(self, batch: TrainBatch, steps: Sequence[Sequence[int]]) -> ResponseTokens:
        def flat(lists: Iterable[Sequence[float]]) -> torch.Tensor:
            values = list(itertools.chain.from_iterable(lists))
            return torch.tensor(values, dtype=torch.float32, device=self.device)

        per_token = self.config.train.calculate_per_token_loss
        weights = [weight for step in steps for weight in token_weights([batch.loss_masks[i] for i in step], per_token)]
        given = batch.rollout_log_probs
        return ResponseTokens(
            flat(batch.loss_masks), flat(weights), rollout_log_probs=None if given is None else flat(given)
        )

    def _log_probs_before(
        self,
        batch: TrainBatch,
        steps: Sequence[Sequence[int]],
        rows: Sequence[Rows],
        offsets: Sequence[int],
        data: ResponseTokens,
    ) -> torch.Tensor | None:
        """Fill in what the policy loss takes as given: reference and old log-probs, and advantages.

        Returns the policy's own log-probs before the first step, or None where the first step's forward pass gives
        the very same numbers: a pass over the whole rollout is saved.
        """
        config, options = self.config, self.config.algorithm
        if config.train.loss_type != "policy_loss":
            return None
        separate = config.train.use_dynamic_batch_size and config.train.log_probs_max_tokens_per_gpu is not None
        if separate:
            rows = [self._forward.micro_batches(batch, step, offsets, learning=False) for step in steps]
        if self._reference is not None:
            data.ref_log_probs = self._reference_log_probs(rows, data)
        ours = None
        if options.use_rollout_logprobs:
            if data.rollout_log_probs is None:
                raise DataError("--use-rollout-logprobs, but the answers came without the engine's log-probs")
            data.old_log_probs = data.rollout_log_probs
        if options.kl_coef or not options.use_rollout_logprobs:
            dropout = config.model.attention_dropout or config.model.hidden_dropout
            if len(steps) > 1 or options.kl_coef or dropout:
                ours = self._all_log_probs(rows, data)
                if not options.use_rollout_logprobs:
                    data.old_log_probs = ours
        lengths = batch.response_lengths
        kl = None
        if options.kl_coef:
            assert ours is not None
            assert data.ref_log_probs is not None
            kl = list(kl_estimate(options.kl_loss_type, ours, data.ref_log_probs).split(lengths))
        masks = list(data.loss_mask.split(lengths))
        advantages = compute_advantages(options, batch.rewards, batch.group_ids, masks, kl)
        data.advantages = torch.cat(advantages) if advantages else data.loss_mask
        return ours

    def _all_log_probs(self, rows: Sequence[Rows], data: ResponseTokens) -> torch.Tensor:
        """Log-probs of all response tokens of the rollout under the weights in place, on every rank."""
        found = torch.zeros_like(data.loss_mask)
        for step_rows in rows:
            self._forward.log_probs(step_rows, found)
        return parallel.sum_over_tokens(found, self.groups)

    def _reference_log_probs(self, rows: Sequence[Rows], data: ResponseTokens) -> torch.Tensor:
        assert self._reference is not None
        if self._policy is None:
            self._policy = memory.WeightCopy(self.arenas)
        self._policy.take()
        try:
            self._reference.put()
            return self._all_log_probs(rows, data)
        finally:
            self._policy.put()

    def _step(self, rows: Rows, data: ResponseTokens, what: str, keep: torch.Tensor | None) -> dict[str, float]:
        """One optimizer step. ``keep``: takes the log-probs of this rank's tokens, [response tokens]."""
        cp_group = self.groups.cp if self.groups.cp_size > 1 else None

        def loss(
            micro: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if keep is not None:
                keep[micro.slots] = log_probs.detach()
            return learning_loss(self.config, data, micro.slots, micro.lengths, log_probs, entropy, cp_group)

        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._forward.backward(rows, loss)
        names = metric_names(self.config, data)
        values = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if sums:
            values += torch.stack([sums[name] for name in names])
        mine = bool(values.isfinite().all())
        values = parallel.sum_over_tokens(values, self.groups)
        metrics = dict(zip(names, values.tolist(), strict=True))
        if not all(math.isfinite(value) for value in metrics.values()):
            guilty = parallel.gather_flags(not mine, self.device)
            shown = ", ".join(f"{name} {value}" for name, value in metrics.items())
            raise TrainerError(f"{what}: the loss is not finite ({shown}); first seen on rank(s) {guilty}")
        metrics["lr"] = float(get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0)
        metrics["grad_norm"] = guarded_step(self.optimizer, what)
        self.schedule.step(1)
        return metrics

    # ------------------------------------------------------------------ weights, checkpoints, memory

    @_on_device
    def connect_rollout_engines(self, addresses: list[EngineAddress]) -> None:
        if self._engines is None:
            from vime.backends.megatron_utils.update_weight import weight_update_class

            self._engines = weight_update_class(self.config.weight_sync.update_weight_transport)(
                self.config, self.spec, self.layout, self.rank, self._data(), self.device.type
            )
        self._engines.connect_rollout_engines(addresses)

    @_on_device
    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        """Bring these weights into the engines (into those of ``only``) as ``version``."""
        if self._engines is None:
            raise TrainerError("update_weights() was called before connect_rollout_engines()")
        return self._engines.update_weights(version, only)

    @_on_device
    def save(self, directory: str) -> None:
        """Write weights, optimizer (unless --no-save-optim), schedule and random states into an empty directory."""
        optimizer = None if self.config.checkpoint.no_save_optim else self.optimizer
        save_checkpoint(directory, self.ddp, optimizer, self.schedule, spec=self.spec, layout=self.layout)

    @_on_device
    def load(self, directory: str) -> None:
        """Continue from what :meth:`save` wrote, in this or another parallel layout; exactly, in this one.

        With --no-load-optim the schedule starts over with the optimizer, as in Megatron-LM: moments that begin at zero
        need the warm-up again.
        """
        fresh = self.config.checkpoint.no_load_optim
        optimizer, schedule = (None, None) if fresh else (self.optimizer, self.schedule)
        load_checkpoint(directory, self.ddp, optimizer, schedule, spec=self.spec, layout=self.layout)
        if fresh:
            follow_weights(self.optimizer)

    @_on_device
    def save_hf(self, directory: str) -> None:
        """Write the weights as a Hugging Face directory."""
        export_hf_weights(
            directory,
            self._data(),
            self.spec,
            self.layout,
            self.rank,
            source_hf_dir=self.config.checkpoint.hf_checkpoint,
        )

    @_on_device
    def offload(self, weights: bool = False) -> dict[str, float]:
        """Move the optimizer's state to host memory and give up gradient buffers; with ``weights`` the weights too.

        On a CPU everything is in host memory already, so nothing is moved (said once in the log).
        """
        if self.device.type != "cuda":
            if not self._told_nothing_to_move:
                log.info("offload: the trainer runs on the CPU, so its state is in host memory already")
                self._told_nothing_to_move = True
            return {"bytes": 0.0}
        freed = 0
        if not self._movable.is_away:
            freed += self._movable.move_out(
                memory.optimizer_tensors(self.optimizer, self.arenas), memory.gradient_buffers(self.ddp)
            )
        if weights and not self._movable_weights.is_away:
            freed += self._movable_weights.move_out([arena.buffer for arena in self.arenas])
        return {"bytes": float(freed)}

    @_on_device
    def onload(self) -> dict[str, float]:
        """Take back what :meth:`offload` moved; at the same addresses or, for weights, perhaps at others."""
        return {"bytes": float(self._movable_weights.move_in() + self._movable.move_in())}

    def memory_report(self) -> dict[str, int]:
        return memory.memory_report(self.device, self.arenas, memory.gradient_buffers(self.ddp))

    def close(self) -> None:
        """Forget Megatron's groups, and leave the process group if this trainer formed it."""
        parallel.destroy(self._owns_process_group)
