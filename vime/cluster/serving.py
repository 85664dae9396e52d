"""Keeps the engines serving the current weights: hand-over of the GPUs, weight sync, replacement of engines that die.

An engine may die at any moment. What was in its hands is asked for again, a new one is started on the same GPUs, and it
gets the weights of the current version before it serves; the run goes on until ``--engine-restarts`` are used up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from vime.cluster.device import Device
from vime.cluster.engine_group import EngineGroup
from vime.cluster.trainer_group import TrainerGroup
from vime.config import Config
from vime.errors import EngineError, WeightSyncError
from vime.types import EngineAddress

log = logging.getLogger(__name__)


class Serving:
    """The engines together with what they need from the trainer.

    ``version`` is that of the weights the engines have: the number of rollouts learned from, so that a continued run
    counts on where the interrupted one stopped.
    """

    def __init__(self, config: Config, device: Device, trainer: TrainerGroup, engines: EngineGroup) -> None:
        self._trainer, self._engines = trainer, engines
        self.version = -1
        # Two engines may be found dead by two requests at once; and whoever gave up waiting for a replacement has not
        # ended it.
        self._repairing = threading.RLock()
        self._failure: BaseException | None = None  # of a replacement, for which nobody may have waited
        cluster = config.cluster
        offload = cluster.offload or cluster.colocate
        self._engines_sleep = offload if cluster.offload_rollout is None else cluster.offload_rollout
        # On a CPU nothing would be gained: both sides use the same memory.
        self._trainer_moves = offload and device == "cuda" if cluster.offload_train is None else cluster.offload_train

    def ready(self) -> list[EngineAddress]:
        """Addresses of all engines, all with the current weights: those of one that is being replaced have to be waited
        for, which may take minutes. (A new engine answers from its first moment on, with the weights it started with.)

        Raises:
            EngineError, WeightSyncError: one could not be replaced.
        """
        with self._repairing:
            self._tell_failure()
            return self._engines.addresses

    def start(self, version: int) -> dict[str, float]:
        """Connect all engines and give them their first weights."""
        self._trainer.connect(self._engines.addresses)
        return self.update_weights(version)

    def to_trainer(self) -> None:
        """The engines have answered; the trainer may have the GPUs."""
        with self._repairing:
            if self._engines_sleep:
                try:
                    self._engines.sleep()
                except EngineError as error:
                    log.warning("%s; if it has died, it is replaced when the engines are needed again", error)
            if self._trainer_moves:
                self._trainer.onload()

    def to_engines(self, version: int) -> dict[str, float]:
        """The trainer has learned; the engines get the GPUs and the new weights. Returns the sync's measurements."""
        with self._repairing:
            self._tell_failure()
            if self._trainer_moves:
                self._trainer.offload()
            self._replace_dead()
            while True:
                try:
                    return self._wake_with(version)
                except EngineError:
                    if not self._replace_dead(suspects=[address.index for address in self._engines.addresses]):
                        raise

    def _wake_with(self, version: int) -> dict[str, float]:
        """Nothing is asked of an engine that is awake already, of an earlier attempt, but to take the weights again."""
        if self._engines_sleep:
            self._engines.wake("weights")
        measured = self.update_weights(version)
        if self._engines_sleep:
            self._engines.wake("kv_cache")
        return measured

    def update_weights(self, version: int) -> dict[str, float]:
        """Bring the trainer's weights into every engine. An engine that dies meanwhile is replaced and all start again.

        Raises:
            WeightSyncError: the update failed and every engine lives.
        """
        with self._repairing:
            while True:
                try:
                    measured = self._trainer.update_weights(version)
                except WeightSyncError as error:
                    if not self._replace_dead(suspects=error.engines):
                        raise
                    continue
                self.version = version
                return measured

    def recover(self, index: int) -> EngineAddress:
        """Called while answers are generated, when engine ``index`` does not answer: replace it if it has died or is
        about to, and whoever died with it (the trainer can connect all engines, or none).

        Returns its address, a new one if it was replaced. The other engines go on serving.
        """
        with self._repairing:
            self._tell_failure()
            try:
                # Who listens is not suspected: a request may fail, and its repeat need not wait for a death.
                new = self._replace_dead(() if self._engines.listens(index) else (index,))
                if new:
                    self._catch_up(new)
            except BaseException as error:
                self._failure = error
                raise
            return next(address for address in self._engines.addresses if address.index == index)

    def _tell_failure(self) -> None:
        """Raise what a replacement has failed of: an engine may be missing, or have other weights than the rest."""
        if self._failure is not None:
            raise self._failure

    def _catch_up(self, new: set[int]) -> None:
        """Bring the current weights into engines that were replaced, and into those that must be meanwhile."""
        while True:
            try:
                self._trainer.update_weights(self.version, sorted(new))
                return
            except WeightSyncError as error:
                more = self._replace_dead(error.engines)
                if not more:
                    raise
                new |= more

    def _replace_dead(self, suspects: Sequence[int] = ()) -> set[int]:
        """Replace all that have died, and connect the engines; again, if another dies meanwhile. Returns the new ones.

        Raises:
            WeightSyncError: they cannot be connected, and all of them live.
        """
        new: set[int] = set()
        dead = self._engines.dead(suspects)
        while dead:
            for index, cause in dead.items():
                self._engines.replace(index, cause)
            new |= dead.keys()
            dead = {}
            try:
                self._trainer.connect(self._engines.addresses)
            except WeightSyncError as error:
                dead = self._engines.dead(error.engines)
                if not dead:
                    raise
        return new
