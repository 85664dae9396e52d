r"""``--rm-type deepscaler``: 1 if the answer given after the thinking is right, else 0 (DeepScaleR, Luo et al. 2025).

Only what follows ``</think>`` (or ``###Response``) counts: a response that never stops thinking gets 0, whatever it
says. The answer there is the last ``\boxed{}``, or failing that the last ``Answer:`` line.
"""

from __future__ import annotations

from vime.rollout.rewards.extract import answer_line, boxed

LOOKS_FOR = "</think>"
RIGHT, WRONG = 1.0, 0.0


def extract(response: str) -> str | None:
    for mark in ("</think>", "###Response"):
        if mark in response:
            solution = response.rsplit(mark, 1)[1]
            answer = boxed(solution)
            return answer if answer is not None else answer_line(solution)
    return None


def found(response: str) -> bool:
    return "</think>" in response or "###Response" in response
