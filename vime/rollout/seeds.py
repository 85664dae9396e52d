"""Seeds of the requests: a function of the run's seed and the answer's place in the run, and of nothing else.

So an answer is the same whichever engine gives it, whenever, after whatever retries, and in a run that was continued.
"""

from __future__ import annotations

import hashlib


def request_seed(rollout_seed: int, *place: int | str) -> int:
    """A seed in [0, 2^63), which is what vLLM takes.

    Args:
        rollout_seed: ``--rollout-seed``.
        place: what tells this request from all others, e.g. ("train", 17, 0).
    """
    text = "/".join(map(str, (rollout_seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
