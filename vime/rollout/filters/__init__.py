"""Filters of groups for ``--dynamic-sampling-filter-path``: ``function(config, group) -> bool``, True keeps it."""

from __future__ import annotations

from vime.config import Config
from vime.types import Sample


def rewards_differ(config: Config, group: list[Sample]) -> bool:
    """Keep groups whose answers are not all worth the same: the others have no gradient (DAPO, section 3.2)."""
    return len({sample.reward for sample in group}) > 1
