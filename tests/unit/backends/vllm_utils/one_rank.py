"""A trainer of one rank, without Megatron: the checkpoint's tensors in Megatron's places, synced to a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vime.backends.megatron_utils.hf_weights import load_hf_weights
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from vime.models.layout import ParallelLayout, parameter_shapes, pieces
from vime.types import EngineAddress, Slot
from vime.weight_sync.arena import allocate

if TYPE_CHECKING:
    from tests.engine import TinyEngine

LAYOUT = ParallelLayout(world_size=1)


class OneRank:
    def __init__(self, engine: TinyEngine, **weight_sync: Any) -> None:
        self.engine = engine
        shapes = parameter_shapes(engine.spec, LAYOUT, 0)
        flat, end = allocate(4 * sum(torch.Size(shape).numel() for shape in shapes.values())), 0
        self.params: dict[tuple[int, str], torch.Tensor] = {}
        for key, shape in shapes.items():
            count = 4 * torch.Size(shape).numel()
            self.params[key] = flat[end : end + count].view(torch.float32).view(shape)
            end += count
        for name, value in weight_sync.items():
            setattr(engine.config.weight_sync, name, value)
        self.update = UpdateWeightFromTensor(engine.config, engine.spec, LAYOUT, 0, self.params, "cpu")

    def load(self, checkpoint: str) -> None:
        load_hf_weights(checkpoint, self.params, pieces(self.engine.spec, LAYOUT, 0))

    def connect(self) -> None:
        workers = self.engine.client.get_world_size()
        slot = Slot(0, 1) if workers == 1 else None
        self.update.connect_rollout_engines([EngineAddress(0, self.engine.url, workers, slot)])
