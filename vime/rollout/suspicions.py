"""Says aloud, once each, when a whole rollout teaches nothing: the commonest faults of a set-up look like this."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vime.rollout.rewards import MATHEMATICAL, Rewarder
from vime.types import Sample, Status

logger = logging.getLogger(__name__)

_SHOWN = 300  # characters of an example, from its end: that is where the answer should be


class Suspicions:
    def __init__(self, rewarder: Rewarder) -> None:
        self._rewarder = rewarder
        self._said: set[str] = set()

    def look(self, samples: Sequence[Sample], where: str) -> None:
        """Check one rollout."""
        if not samples:
            return
        kinds = {self._rewarder.kind(sample) for sample in samples}
        for kind in sorted(kind for kind in kinds if kind in MATHEMATICAL):
            mine = [sample for sample in samples if self._rewarder.kind(sample) == kind]
            module = MATHEMATICAL[kind]
            if not any(module.found(sample.response) for sample in mine):
                cut = sum(sample.status is Status.TRUNCATED for sample in mine)
                self._say(
                    f"missing {kind}",
                    f"{where}: none of {len(mine)} answers contains what reward '{kind}' looks for, {module.LOOKS_FOR}"
                    f" ({cut} were cut off at the length limit)",
                    mine[0],
                )
        rewards = {sample.reward for sample in samples}
        if len(samples) > 1 and len(rewards) == 1:
            self._say(
                "equal",
                f"{where}: all {len(samples)} rewards are {samples[0].reward:g}: there is nothing to learn from them",
                samples[0],
            )

    def _say(self, key: str, text: str, example: Sample) -> None:
        if key in self._said:
            return
        self._said.add(key)
        end = example.response if len(example.response) <= _SHOWN else "…" + example.response[-_SHOWN:]
        logger.warning("%s. For example (label %r): %r", text, example.label, end)
