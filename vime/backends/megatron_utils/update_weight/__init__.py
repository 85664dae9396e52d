"""How the trainer's weights reach the engines; one file per way."""

from __future__ import annotations

from vime.backends.megatron_utils.update_weight.update_weight_from_disk import UpdateWeightFromDisk
from vime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor

__all__ = ["UpdateWeightFromDisk", "UpdateWeightFromDistributed", "UpdateWeightFromTensor", "weight_update_class"]

_CLASSES = {
    "planned": UpdateWeightFromTensor,
    "bucketed": UpdateWeightFromTensor,
    "distributed": UpdateWeightFromDistributed,
    "disk": UpdateWeightFromDisk,
}


def weight_update_class(transport: str) -> type[UpdateWeightFromTensor]:
    """The class behind a value of ``--update-weight-transport``."""
    return _CLASSES[transport]
