"""The reward of the example: 1 for the right number and nothing else, 0 otherwise."""

from __future__ import annotations

from vime.config import Config
from vime.types import Sample


def exact(config: Config, sample: Sample) -> float:
    """``--custom-rm-path examples.arithmetic.reward.exact``"""
    return float(sample.response.removesuffix("<|end|>") == sample.label)
