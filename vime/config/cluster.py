"""Which machines and GPUs the run takes, and how trainer and engines share them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vime.config.option import option


@dataclass(kw_only=True)
class ClusterOptions:
    """Cluster"""

    train_backend: str = option("megatron", "the trainer", choices=("megatron",))
    actor_num_nodes: int = option(1, "nodes the trainer runs on", minimum=1)
    actor_num_gpus_per_node: int = option(
        1, "trainer ranks per node (CPU processes on a machine without GPU)", minimum=1
    )
    rollout_num_gpus: int | None = option(
        None,
        "GPUs for the engines; with --colocate, the number of trainer ranks unless given; more than that have GPUs "
        "of their own",
        minimum=1,
    )
    rollout_num_gpus_per_engine: int = option(1, "GPUs of one engine", minimum=1)
    colocate: bool = option(False, "trainer and engines share the same GPUs")
    offload: bool = option(False, "--offload-train and --offload-rollout")
    offload_train: bool | None = option(
        None, "move optimizer and gradients to host memory while engines generate (default: with --colocate, on GPUs)"
    )
    offload_rollout: bool | None = option(
        None, "put the engines to sleep while the trainer works (default: with --colocate)"
    )
    device: str = option("auto", "where it runs; auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu"))
    ray_address: str | None = option(
        None, "an existing Ray cluster (default: RAY_ADDRESS, else a local one started and stopped by the run)"
    )

    @property
    def existing_ray(self) -> str | None:
        """Address of the Ray cluster to join, or None for the run's own. ``--ray-address`` wins over RAY_ADDRESS."""
        address = self.ray_address or os.environ.get("RAY_ADDRESS") or None
        return None if address == "local" else address  # Ray's word for a new one

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        """Number of GPUs the engines take, --rollout-num-gpus or its default."""
        return self.rollout_num_gpus if self.rollout_num_gpus is not None else self.world_size

    @property
    def num_engines(self) -> int:
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine
