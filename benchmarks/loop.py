"""The whole system on GPUs: three rollouts of GRPO with random weights of Qwen3-0.6B's shape, in several layouts.

    python benchmarks/loop.py tp2 dp2      # on a machine with two GPUs; writes benchmarks/loop_<device>.md

Random weights are enough for every timing, for the log-prob difference between engine and trainer, and for the full
check of every sync. Engines run without CUDA graphs, so that they start in less time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LAYOUTS = {
    "one": "",
    "tp2": "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2",
    "dp2": "--actor-num-gpus-per-node 2 --use-distributed-optimizer",
    "pp2": "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --rollout-num-gpus-per-engine 2",
    "cp2": "--actor-num-gpus-per-node 2 --context-parallel-size 2",
}
FLAGS = """
--input-key prompt --label-key label --apply-chat-template --custom-rm-path tests.e2e.runs.parity_reward --colocate
--num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 128 --lr 1e-5 --use-kl-loss
--kl-loss-coef 0.01 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --check-weight-update full
--vllm-enforce-eager --vllm-gpu-memory-utilization 0.3
"""
COLUMNS = {
    "train/logprob_abs_diff": "mean abs log-prob difference",
    "train/grad_norm": "gradient norm",
    "time/generate": "generate s",
    "time/train": "train s",
    "time/update_weights": "hand-over and sync s",
    "sync/seconds": "update_weights() s",
    "sync/copy_seconds": "copy and full check s",
    "sync/bytes": "bytes",
    "sync/local_share": "local share",
}


def make_inputs(folder: Path) -> None:
    import torch
    import transformers

    sys.path.insert(0, str(ROOT))
    from tests.tiny import make_tokenizer

    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"{number} + {3 * number} =", "label": "1"} for number in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(layout: str, folder: Path) -> list[str]:
    run = folder / layout
    words = ["--hf-checkpoint", folder / "model", "--prompt-data", folder / "prompts.jsonl", "--run-dir", run]
    command = [sys.executable, str(ROOT / "train.py"), *map(str, words), *FLAGS.split(), *LAYOUTS[layout].split()]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        f"| {layout} | {row['step']} | " + " | ".join(f"{row[name]:.4g}" for name in COLUMNS) + " |" for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("layouts", nargs="+", choices=list(LAYOUTS))
    chosen = parser.parse_args().layouts
    import torch

    device = torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"
    head = ["layout", "step", *COLUMNS.values()]
    table = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name))
        for layout in chosen:
            table += measure(layout, Path(name))
    when = f"{datetime.date.today()}, torch {torch.__version__}"
    command = f"python benchmarks/loop.py {' '.join(chosen)}"
    text = "\n".join([f"# {(__doc__ or '').splitlines()[0]}", "", f"`{command}`, {when}", "", *table, ""])
    (ROOT / "benchmarks" / f"loop_{device}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
