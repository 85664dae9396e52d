r"""``--rm-type dapo``: 1 if the answer is right, else -1 (DAPO, Yu et al. 2025, section 2.4).

The answer is the last ``Answer:`` line in the final 300 characters (verl's and slime's limit: the line is asked for at
the end), where ``\boxed{}`` around it is taken off; failing that, the last ``\boxed{}`` there.
"""

from __future__ import annotations

from vime.rollout.rewards.extract import answer_line, boxed

LOOKS_FOR = r"an 'Answer:' line or \boxed{} in the last 300 characters"
RIGHT, WRONG = 1.0, -1.0
_END = 300


def extract(response: str) -> str | None:
    end = response[-_END:]
    line = answer_line(end)
    if line is None:
        return boxed(end)
    inner = boxed(line)
    return line if inner is None else inner


def found(response: str) -> bool:
    return extract(response) is not None
