"""UpdateWeightFromDisk: for engines with which the trainer shares nothing but a file system."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vime.backends.megatron_utils.hf_export import export_hf_weights
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import Engine, Key, UpdateWeightFromTensor
from vime.config import Config
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec


class UpdateWeightFromDisk(UpdateWeightFromTensor):
    """Every update writes a Hugging Face directory and has the engines load it by vLLM's own ``load_weights``.

    Slow, and independent of everything else here but the model's layout rules. The directory, below
    ``--update-weight-disk-dir``, is removed once all engines have confirmed.
    """

    maps = False

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        layout: ParallelLayout,
        rank: int,
        named_params: Mapping[Key, torch.Tensor],
        device: str,
    ) -> None:
        super().__init__(config, spec, layout, rank, named_params, device)
        assert self.options.update_weight_disk_dir is not None
        self._transport = "disk"
        self._root = Path(self.options.update_weight_disk_dir)
        self._source, self._spec, self._layout = config.checkpoint.hf_checkpoint, spec, layout

    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        try:
            return super().update_weights(version, only)
        finally:
            if self.rank == 0:  # past the last meeting: nobody reads it any more
                shutil.rmtree(self._directory(version), ignore_errors=True)

    def _directory(self, version: int) -> Path:
        return self._root / f"version-{version}"

    def _prepare(self, version: int) -> dict[str, Any] | None:
        moved = super()._prepare(version)
        if self.rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
        export_hf_weights(
            self._directory(version),
            self._params,
            self._spec,
            self._layout,
            self.rank,
            source_hf_dir=self._source,
        )
        return moved

    def _needs_buckets(self, engine: Engine) -> bool:
        return False

    def _begin(self, update: EngineUpdate, version: int, by_plan: set[int], by_bucket: set[int]) -> None:
        update.pause()
        update.start()
        update.send({"version": version, "directory": str(self._directory(version).absolute())})
