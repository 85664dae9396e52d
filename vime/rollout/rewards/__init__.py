"""Rewards: what an answer is worth.

A built-in one is a small file here. Those that compare mathematical answers state where the answer stands
(``extract``), what right and wrong are worth, and what a response must contain at all (``LOOKS_FOR``, ``found``).
"""

from vime.rollout.rewards.rewarder import MATHEMATICAL, Rewarder

__all__ = ["MATHEMATICAL", "Rewarder"]
