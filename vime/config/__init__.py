"""All options of a run, by topic. ``Config.rollout.rollout_batch_size`` is ``--rollout-batch-size``."""

from __future__ import annotations

from dataclasses import dataclass, field

from vime.config.algorithm import AlgorithmOptions
from vime.config.checkpoint import CheckpointOptions, ObserveOptions, WeightSyncOptions
from vime.config.cluster import ClusterOptions
from vime.config.model import ModelOptions
from vime.config.parallel import ParallelOptions
from vime.config.rollout import DataOptions, EvalOptions, RewardOptions, RolloutOptions
from vime.config.train import OptimizerOptions, TrainOptions


@dataclass(kw_only=True)
class Config:
    """Every option of a run; plain data, so it travels to every process as it is."""

    checkpoint: CheckpointOptions
    rollout: RolloutOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    data: DataOptions = field(default_factory=DataOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    weight_sync: WeightSyncOptions = field(default_factory=WeightSyncOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    given: list[str] = field(default_factory=list)  # names of the options that were written down, not left to defaults

    @property
    def answers_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Answers per optimizer step."""
        return self.train.global_batch_size or self.answers_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        return self.answers_per_rollout // self.global_batch_size


__all__ = [
    "AlgorithmOptions",
    "CheckpointOptions",
    "ClusterOptions",
    "Config",
    "DataOptions",
    "EvalOptions",
    "ModelOptions",
    "ObserveOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "RewardOptions",
    "RolloutOptions",
    "TrainOptions",
    "WeightSyncOptions",
]
