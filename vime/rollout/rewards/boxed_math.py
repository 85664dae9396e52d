r"""``--rm-type math``: 1 if the last ``\boxed{}`` of the response is right, else 0 (Hendrycks et al. 2021, MATH)."""

from __future__ import annotations

from vime.rollout.rewards.extract import boxed

LOOKS_FOR = r"\boxed{}"
RIGHT, WRONG = 1.0, 0.0


def extract(response: str) -> str | None:
    return boxed(response)


def found(response: str) -> bool:
    return boxed(response) is not None
