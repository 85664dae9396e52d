"""The learning rate at each optimizer step, against its formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.backends.megatron_utils.trainer_helpers import make_config
from vime.backends.megatron_utils.lr_schedule import build_schedule, decay_and_warmup_steps
from vime.errors import ConfigError


def rates(steps: int, **options: Any) -> list[float]:
    config = make_config("-", 1, {f"optimizer.{name}": value for name, value in options.items()})
    groups = [{"params": []}, {"params": [], "wd_mult": 0.0}]
    schedule = build_schedule(config, SimpleNamespace(param_groups=groups))
    found = []
    for _ in range(steps):
        found.append(groups[0]["lr"])
        schedule.step(1)
    assert groups[0]["weight_decay"] == config.optimizer.weight_decay
    assert groups[1]["weight_decay"] == 0.0
    return found


def test_constant_with_warmup() -> None:
    assert rates(5, lr=1.0, lr_warmup_iters=4, weight_decay=0.1) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates(3, lr=1e-6) == [1e-6] * 3


def test_linear_and_cosine() -> None:
    assert rates(5, lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_decay_iters=4) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2]
    )
    cosine = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(6, lr=1.0, lr_decay_style="cosine", lr_decay_iters=4) == pytest.approx([*cosine, 0.0])


def test_the_run_decides_how_long() -> None:
    config = make_config("-", 1, {"train.global_batch_size": 2, "optimizer.lr_decay_style": "cosine"})
    assert decay_and_warmup_steps(config) == (12, 0)  # three rollouts of eight answers
    config.optimizer.lr_warmup_fraction = 0.25
    assert decay_and_warmup_steps(config) == (12, 3)
    config.rollout.num_rollout = None
    with pytest.raises(ConfigError, match="--lr-warmup-fraction needs --lr-decay-iters or --num-rollout"):
        decay_and_warmup_steps(config)
    config.optimizer.lr_warmup_fraction, config.optimizer.lr_warmup_iters = None, 20
    config.optimizer.lr_decay_iters = 20
    with pytest.raises(ConfigError, match="20 steps of warm-up"):
        decay_and_warmup_steps(config)
