"""The run that vime must be able to do, flag by flag, with sizes that suit a CPU; and what the engines then serve."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, RUN_SECONDS, SMALL, Running, as_flags, make_inputs

pytestmark = pytest.mark.timeout(600)  # whole runs, two of them where a fixture makes the first

FLAGS = """
--train-backend megatron --actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2
--rollout-num-gpus-per-engine 1
--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 32 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 10000 --use-rotary-position-embeddings --disable-bias-linear --vocab-size 512
--untie-embeddings-and-output-weights
--hf-checkpoint {hf-checkpoint} --ref-load {hf-checkpoint}
--prompt-data {prompt-data} --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
--rm-type deepscaler --colocate
--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 16
--rollout-temperature 1.0 --global-batch-size 32 --balance-data
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --entropy-coef 0.0
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size
--max-tokens-per-gpu 256 --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash --train-memory-margin-bytes 2147483648 --use-tensorboard
"""


def test_runs_three_steps(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    flags = FLAGS.format(**inputs).split()
    run = Running(flags, tmp_path / "run", env={"TENSORBOARD_DIR": str(tmp_path / "events")})
    done = run.finish()
    assert done.code == 0, done.output
    assert [row["step"] for row in done.rows] == [0, 1, 2]
    for row in done.rows:
        assert row["train/logprob_abs_diff"] <= 1e-5
        assert math.isfinite(row["train/kl"])  # reported although its coefficient is 0
        assert row["train/lr"] == 1e-6
    # A random model never writes </think>: said aloud, with an example of what it wrote.
    assert "</think>" in done.output
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    recorded = [event.value for event in events.Scalars("train/grad_norm")]
    assert recorded == pytest.approx([row["train/grad_norm"] for row in done.rows])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm"]["eps_clip_high"] == 0.28


@pytest.mark.parametrize("tied", [False, True])
def test_engines_serve_what_is_exported_after_every_sync(tied: bool, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, tied=tied)
    options = {**SMALL, **inputs, "num-rollout": 2, "run-dir": tmp_path / "run"}
    program = [sys.executable, "-m", "tests.e2e.after_every_sync", str(tmp_path / "exports"), *as_flags(options)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 versions: greedy answers equal" in done.stdout
