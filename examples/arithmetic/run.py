"""The whole example: data and model from nothing, warm-up, reinforcement learning, table, report.

    python examples/arithmetic/run.py --seed 1
    python examples/arithmetic/run.py --kind add,sub --max 50 -- --lr 5e-5 --num-rollout 60

What follows ``--`` goes to the reinforcement learning as it is, after the options of grpo.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from examples.arithmetic import prepare

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    prepare.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="directory of the run (default: runs/arithmetic-seed<seed>-<time>)")
    parser.add_argument("--warmup", type=int, metavar="N", help="rollouts of the warm-up (default: warmup.yaml's)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="further flags of the reinforcement learning")
    args = parser.parse_args()
    out = args.out or ROOT / "runs" / f"arithmetic-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = out.resolve()
    start = time.monotonic()

    said("1/3 problems, tokenizer and a random model")
    try:
        made = prepare.prepare(
            out, seed=args.seed, kinds=args.kind.split(","), limit=args.max, unseen=args.unseen, slips=args.slips,
            hidden_size=args.hidden_size, layers=args.layers,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    print(f"{made['parameters']:,} parameters, {made['train']} problems to train on, {made['unseen']} unseen ones")

    said("2/3 warm-up: imitating a sloppy pupil")
    train(
        *("--config", HERE / "warmup.yaml"),
        *("--hf-checkpoint", out / "model", "--prompt-data", out / "warmup.jsonl"),
        *("--save-hf", out / "warm", "--run-dir", out / "warmup"),
        *("--seed", args.seed, "--rollout-seed", args.seed),
        *(("--num-rollout", args.warmup) if args.warmup is not None else ()),
    )

    said("3/3 reinforcement learning: vLLM answers, Megatron-Core learns")
    train(
        *("--config", HERE / "grpo.yaml"),
        *("--hf-checkpoint", out / "warm", "--prompt-data", out / "train.jsonl"),
        *("--eval-prompt-data", "unseen", out / "unseen.jsonl"),
        *("--save-hf", out / "trained", "--run-dir", out / "grpo"),
        *("--seed", args.seed, "--rollout-seed", args.seed),
        *args.flags,
    )
    subprocess.run([sys.executable, "-m", "vime.cli", "report", out / "grpo"], cwd=ROOT, check=True)
    before, after = measured(out / "grpo" / "metrics.jsonl")
    gain = f"{before:.3f} before, {after:.3f} after ({after - before:+.3f})"
    print(f"\nmean reward on {made['unseen']} unseen problems: {gain}")
    print(f"{time.monotonic() - start:.0f} s; everything is in {os.path.relpath(out)}, begin with grpo/report.html")
    return 0


def train(*flags: object) -> None:
    """``python train.py FLAGS``, shown as it could be typed. Ends the example where the training fails."""
    words = [str(flag) for flag in flags]
    print("$ python train.py", shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.returncode)


def measured(metrics: Path) -> tuple[float, float]:
    """Mean reward on the unseen problems before the first step and after the last."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["eval/unseen/reward_mean"] for row in rows if "eval/unseen/reward_mean" in row]
    return rewards[0], rewards[-1]


def said(text: str) -> None:
    print(f"\n── {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
