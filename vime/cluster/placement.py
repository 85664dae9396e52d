"""Which process sits on which GPU.

One placement group holds one bundle per GPU. Colocated, rank i and worker i share bundle i, and workers beyond the last
rank have bundles of their own; otherwise the engines' bundles follow the trainer's. Bundles are sorted by node and GPU,
so that a slot is a contiguous range on one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.cluster.calls import gather
from vime.cluster.device import Device
from vime.cluster.process import LOOPBACK, ON_LOOPBACK
from vime.config import Config
from vime.errors import VimeError
from vime.types import Slot

_PLACEMENT_SECONDS = 300.0
_LOCATE_SECONDS = 300.0  # Ray starts a process for each bundle


@dataclass(frozen=True)
class Seat:
    """One GPU (or CPU process) of the cluster."""

    bundle: int
    node: str  # its IP address
    gpu: int  # index on its node; on a CPU, a running number


class Placement:
    """Seats of all ranks and engine workers, reserved until the run ends."""

    def __init__(self, config: Config, device: Device) -> None:
        self._cluster, self._device = config.cluster, device
        # The driver of a ray:// address takes no part in the cluster, and has no address there.
        self._driver_node = None if (self._cluster.existing_ray or "").startswith("ray://") else _node_address()[0]
        with_engines = config.train.loss_type != "sft_loss"
        engine_gpus = self._cluster.num_rollout_gpus if with_engines else 0
        ranks = self._cluster.world_size
        bundles = max(ranks, engine_gpus) if self._cluster.colocate else ranks + engine_gpus
        resources = {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        self._group = self._reserve([dict(resources) for _ in range(bundles)])
        self.seats = self._sorted_seats(bundles)
        self.num_engines = self._cluster.num_engines if with_engines else 0

    def _reserve(self, bundles: list[dict[str, float]]) -> PlacementGroup:
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(_PLACEMENT_SECONDS):
            have = {key: value for key, value in ray.cluster_resources().items() if key in ("GPU", "CPU")}
            raise VimeError(
                f"the Ray cluster did not give {len(bundles)} bundles of {bundles[0]} in {_PLACEMENT_SECONDS:.0f} s; "
                f"it has {have}, of which {ray.available_resources()} is free"
            )
        return group

    def _sorted_seats(self, bundles: int) -> list[Seat]:
        if self._device == "cpu":
            locate = ray.remote(num_cpus=0.01)(_node_address)
        else:
            locate = ray.remote(num_cpus=0.01, num_gpus=0.01)(_node_address)
        asked = {f"bundle {bundle}": locate.options(**self._where(bundle)).remote() for bundle in range(bundles)}
        what = "asking Ray's processes in the reserved bundles for their node and GPU"
        places = gather(asked, what, _LOCATE_SECONDS, VimeError).values()
        # Servers listen on these addresses; on one node, that of the driver, on the loopback interface alone.
        local = {node for node, _ in places} == {self._driver_node}
        seats = [
            Seat(bundle, LOOPBACK if local else node, gpu if gpu is not None else bundle)
            for bundle, (node, gpu) in enumerate(places)
        ]
        return sorted(seats, key=lambda seat: (tuple(int(part) for part in seat.node.split(".")), seat.gpu))

    def _where(self, bundle: int) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        }

    def actor_options(self, seat: int, share: float) -> dict[str, Any]:
        """Ray options that put an actor on a seat, taking ``share`` of it (in Ray's books only)."""
        resources = {"num_cpus": share, "num_gpus": share if self._device == "cuda" else 0}
        where = self._where(self.seats[seat].bundle)
        if self._cluster.existing_ray and self.seats[seat].node == LOOPBACK:  # our own cluster's processes inherit it
            where["runtime_env"] = {"env_vars": ON_LOOPBACK}
        return {**resources, **where}

    def engine_seats(self, index: int) -> range:
        """Seats of engine ``index``'s workers."""
        size = self._cluster.rollout_num_gpus_per_engine
        first = index * size + (0 if self._cluster.colocate else self._cluster.world_size)
        return range(first, first + size)

    def slot(self, index: int) -> Slot | None:
        """Trainer ranks that share their GPUs with engine ``index``; None if it has GPUs of its own."""
        if not self._cluster.colocate:
            return None
        seats = self.engine_seats(index)
        if seats.start >= self._cluster.world_size:
            return None
        return Slot(seats.start, seats.stop)


def _node_address() -> tuple[str, int | None]:
    gpus = ray.get_gpu_ids()
    return ray.util.get_node_ip_address(), int(gpus[0]) if gpus else None
