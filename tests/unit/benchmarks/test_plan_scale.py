"""benchmarks/plan_scale.py on a toy, and that its stand-in for a worker of vLLM is one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.models.layout import checkpoint_tensors
from vime.models.spec import spec_from_hf
from vime.weight_sync.boxes import subtract, whole
from vime.weight_sync.load_plan import LoadPlan, trace
from vime.weight_sync.shard_map import TensorInfo

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_a_toy(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "plan_scale.py", "--cases", "small", "--out", tmp_path / "report.md"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "report.md").read_text().strip() == done.stdout.strip()
    rows = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| small | ")]
    assert rows.count("TP2") == rows.count("TP2 DP2 EP4") == 3  # plans, bytes, seconds


@pytest.mark.parametrize("sizes", [(2, 1, False), (4, 1, False), (2, 1, True), (2, 2, True)])
def test_workers_of_an_engine_take_every_tensor_together(
    sizes: tuple[int, int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from meta_worker import EngineLayout, worker_model  # pyright: ignore[reportMissingImports]
    from plan_scale import COMMON, MODELS  # pyright: ignore[reportMissingImports]

    (tmp_path / "config.json").write_text(json.dumps(COMMON | MODELS["toy"] | {"mlp_only_layers": [0]}))
    shapes = checkpoint_tensors(spec_from_hf(tmp_path))
    tensors = {name: TensorInfo(shape, "bfloat16") for name, shape in shapes.items()}
    layout: Any = EngineLayout(*sizes)
    plans: list[LoadPlan] = []
    for worker in range(layout.workers):
        with worker_model(str(tmp_path), layout, worker) as model:
            plans.append(trace(dict(model.named_parameters()), tensors, model.load_weights))
    takers: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        left = [whole(shape)]
        for number, plan in enumerate(plans):
            mine = [copy.region.box for copy in plan.copies if copy.tensor == name]
            for box in mine:
                left = [rest for part in left for rest in subtract(part, box)]
            if mine:
                takers.setdefault(name, []).append(number)
        assert not left, f"{name} {left} is in no worker"
    assert all(not plan.problems and not plan.unwritten for plan in plans)
    expert = [takers[name] for name in shapes if ".experts." in name]
    if layout.ep:  # each expert is whole on one worker, and they share them out evenly
        share = len(expert) // layout.workers
        assert Counter(itertools.chain.from_iterable(expert)) == dict.fromkeys(range(layout.workers), share)
    else:
        assert expert == [list(range(layout.workers))] * len(expert)
    assert takers["model.layers.1.self_attn.q_proj.weight"] == list(range(layout.workers))
    assert not torch.distributed.is_initialized()
