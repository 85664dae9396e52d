"""Rewards: what an answer is worth.

A built-in one is a small file here, an entry in ``MATHEMATICAL`` or ``COMPARING`` in ``rewarder.py``, and its name in
the list that fits in ``vime/config/rollout.py``. Those that compare mathematical answers state where the answer stands
(``extract``), what right and wrong are worth, and what a response must contain at all (``LOOKS_FOR``, ``found``).
"""

from vime.rollout.rewards.rewarder import COMPARING, MATHEMATICAL, Rewarder

__all__ = ["COMPARING", "MATHEMATICAL", "Rewarder"]
