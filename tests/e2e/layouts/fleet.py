"""The engines of one model at a time: two of one worker, one of two; and what vLLM's own loading has left in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.layouts.matrix import MODELS, OTHER_MODELS
from tests.e2e.layouts.pool import RankPool
from tests.e2e.layouts.ranks import Digests, as_loaded
from tests.engine import START_TIMEOUT, tiny_command
from tests.tiny import make_checkpoint
from vime.backends.vllm_utils.engine import EngineProcess
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec, spec_from_hf
from vime.types import EngineAddress, Slot

# Engine -> its number of workers, and the checkpoint that it is started with.
ENGINES = {0: (1, "a"), 1: (1, "b"), 2: (2, "a")}
_SETS = {"TP1": (0,), "TP2": (2,), "two TP1": (0, 1)}
_TINY_CACHE = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "rollout_max_context_len": 128}


@dataclass
class Engine:
    process: EngineProcess
    workers: int


class Fleet:
    """Engines are started when they are first asked for, and stay until another model's are."""

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.folder, self.pool = folder, pool
        self.model = ""
        self._kinds: Mapping[int, tuple[int, str]] = {}
        self._engines: dict[int, Engine] = {}
        self._checkpoints: dict[str, dict[str, str]] = {}
        self._oracle: dict[tuple[int, str], Digests] = {}  # (workers, checkpoint) -> digests

    def checkpoints(self, model: str) -> dict[str, str]:
        """ "a" and "b", of the same shape."""
        if model not in self._checkpoints:
            family, tied, shape = (MODELS | OTHER_MODELS)[model]
            folder = self.folder / model.replace(" ", "-")
            self._checkpoints[model] = {
                name: make_checkpoint(folder / name, family, tied=tied, seed=seed, **shape)
                for seed, name in enumerate("ab")
            }
        return self._checkpoints[model]

    def spec(self, model: str) -> ModelSpec:
        return spec_from_hf(self.checkpoints(model)["a"])

    def ready(self, model: str, kinds: Mapping[int, tuple[int, str]] = ENGINES) -> None:
        """Have these engines serve ``model``, and no others; they start side by side.

        ``kinds``: engine -> its number of workers, and the checkpoint that it is started with.
        """
        if (model, kinds) == (self.model, self._kinds):
            return
        self.close()
        self.model, self._kinds = model, kinds
        checkpoints = self.checkpoints(self.model)
        for index, (workers, name) in kinds.items():
            command = tiny_command(checkpoints[name], workers, index, **_TINY_CACHE)
            process = EngineProcess(command, self.folder / f"{self.model.replace(' ', '-')}-{index}.log")
            process.start()
            self._engines[index] = Engine(process, workers)
        for engine in self._engines.values():
            engine.process.wait_ready(2 * START_TIMEOUT)  # they share the cores
        addresses = [self.address(index, None) for index in kinds]
        found = self.pool.run(1, as_loaded, checkpoints["a"], addresses)[0]
        self._oracle = dict(zip(kinds.values(), found, strict=True))

    def address(self, index: int, slot: Slot | None) -> EngineAddress:
        engine = self._engines[index]
        return EngineAddress(index, engine.process.url, engine.workers, slot)

    def sets(self, names: Sequence[str], layout: ParallelLayout) -> dict[str, list[EngineAddress]]:
        return {name: self._placed(_SETS[name], layout.world_size) for name in names}

    def _placed(self, indices: Sequence[int], ranks: int) -> list[EngineAddress]:
        """One engine shares the GPUs of the last ranks, two those of the first ranks of either half. An engine that
        finds no rank of its own has none."""
        addresses, taken = [], 0
        for number, index in enumerate(indices):
            workers = self._engines[index].workers
            start = number * ranks // 2 if len(indices) == 2 else ranks - workers
            fits = start >= taken and start + workers <= ranks
            addresses.append(self.address(index, Slot(start, start + workers) if fits else None))
            taken = start + workers
        return addresses

    def loaded(self, index: int, name: str) -> Digests | None:
        """What vLLM's own loading of a checkpoint leaves in such an engine; None where none was started with it."""
        return self._oracle.get((self._engines[index].workers, name))

    def close(self) -> None:
        for engine in self._engines.values():
            engine.process.terminate()
        self._engines.clear()
        self._oracle.clear()
        self.model, self._kinds = "", {}
