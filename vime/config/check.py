"""Everything about a run that can be refused before a GPU, Ray, torch or vLLM is touched."""

from __future__ import annotations

from vime.config import Config


def check(config: Config) -> list[str]:
    """Every problem of the run, each a sentence with the values at fault; empty when it may start."""
    return []
