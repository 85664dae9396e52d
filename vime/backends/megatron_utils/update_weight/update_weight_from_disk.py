"""UpdateWeightFromDisk: for engines with which the trainer shares nothing but a file system."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vime.backends.megatron_utils.hf_export import export_hf_weights
from vime.backends.megatron_utils.update_weight.connected import Engine
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor


class UpdateWeightFromDisk(UpdateWeightFromTensor):
    """Every update writes a Hugging Face directory and has the engines load it by vLLM's own ``load_weights``.

    Slow, and independent of everything else here but the model's layout rules. The directory, below
    ``--update-weight-disk-dir``, is removed once all engines have confirmed.
    """

    maps = False
    has_buckets = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: dict[str, str] = {}  # of all tensors in the directory

    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        try:
            return super().update_weights(version, only)
        finally:
            if self.rank == 0:  # past the last meeting: nobody reads it any more
                directory = self._directory(version)
                for made in (directory, directory.with_name(directory.name + ".tmp")):  # an export that failed
                    shutil.rmtree(made, ignore_errors=True)

    def _directory(self, version: int) -> Path:
        """This connection's alone: other runs may use the same folder, and whatever else lies in it is not ours."""
        assert self.options.update_weight_disk_dir is not None
        return Path(self.options.update_weight_disk_dir) / f"vime-{self._connection}-version-{version}"

    def _make_reachable(self, engines: list[Engine], version: int) -> None:
        def export() -> dict[str, str]:
            sums: dict[str, str] = {}
            export_hf_weights(
                self._directory(version),
                self._own.params,
                self._spec,
                self._layout,
                self.rank,
                source_hf_dir=self._config.checkpoint.hf_checkpoint,
                sums=sums if self.options.check_weight_update != "off" else None,
            )
            return sums

        parts = self._gather("ready", export)  # all ranks come to it, since all were ready, and agree on what fails
        self._sums = {name: value for part in parts for name, value in part.items()}

    def _begin(self, update: EngineUpdate, version: int, by_plan: set[int], by_bucket: set[int]) -> None:
        update.pause()
        update.start()
        directory = str(self._directory(version).absolute())
        update.send({"version": version, "directory": directory, "sums": self._sums})
