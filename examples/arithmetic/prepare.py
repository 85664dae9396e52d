"""Makes everything the example needs from nothing: problems with right answers, a tokenizer and a tiny random Qwen3.

    python examples/arithmetic/prepare.py --out runs/arithmetic --seed 1
    python examples/arithmetic/prepare.py --out runs/harder --kind add,sub,mul --max 30

Writes into --out:
    model/            Hugging Face directory: 1.5 M random parameters, a tokenizer of single characters, a chat template
    train.jsonl       {"prompt": "17+25=", "label": "42"}: what is trained on
    warmup.jsonl      the same prompts with the answers of a sloppy pupil: what is imitated first
    unseen.jsonl      problems that stand in neither of them: what is evaluated on
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

KINDS = {"add": "two numbers added", "sub": "subtracted", "mul": "multiplied", "add3": "three numbers added"}
CHARACTERS = "0123456789+-*=? "
SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def problems(kinds: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """All problems of some kinds with numbers below ``limit``, each with its right answer."""
    numbers = range(limit)
    made: list[tuple[str, int]] = []
    for kind in kinds:
        if kind == "add":
            made += [(f"{a}+{b}=", a + b) for a, b in itertools.product(numbers, numbers)]
        elif kind == "sub":
            made += [(f"{a}-{b}=", a - b) for a, b in itertools.product(numbers, numbers)]
        elif kind == "mul":
            made += [(f"{a}*{b}=", a * b) for a, b in itertools.product(numbers, numbers)]
        elif kind == "add3":
            step = max(1, math.ceil(limit**3 / 50_000))  # all of a million would be more than a run ever asks
            triples = itertools.islice(itertools.product(numbers, numbers, numbers), 0, None, step)
            made += [(f"{a}+{b}+{c}=", a + b + c) for a, b, c in triples]
        else:
            raise ValueError(f"no kind of problem '{kind}'; there are {', '.join(KINDS)}")
    return made


def slip(answer: int, rng: random.Random) -> int:
    """A wrong answer as people make them: one too many or too few, a carry forgotten or made up."""
    wrong = [answer + error for error in (-10, -1, 1, 10)]
    return rng.choice([value for value in wrong if value >= 0 or answer < 0])


def make_tokenizer() -> Any:
    """One token per character and per mark of the chat template; decoding gives back exactly the text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "<|unknown|>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, "<|unknown|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(directory: Path, seed: int, hidden_size: int, layers: int) -> int:
    """Write a random Qwen3 with its tokenizer; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=32,  # the tokenizer's 21, rounded up so that it divides over tensor parallel ranks
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(
    out: Path,
    *,
    seed: int = 1,
    kinds: Sequence[str] = ("add",),
    limit: int = 100,
    unseen: int = 512,
    slips: float = 0.66,
    hidden_size: int = 192,
    layers: int = 4,
) -> dict[str, int]:
    """Write model and data below ``out``; the same arguments write the same bytes.

    Args:
        unseen: problems kept for the evaluation.
        slips: share of wrong answers in warmup.jsonl.

    Returns:
        Numbers of parameters and of problems.

    Raises:
        ValueError: an unknown kind, or too few problems for the split.
    """
    rng = random.Random(seed)
    found = problems(kinds, limit)
    rng.shuffle(found)
    if len(found) < 2 * unseen:
        raise ValueError(f"{len(found)} problems are too few to keep {unseen} unseen: raise --max or lower --unseen")
    out.mkdir(parents=True, exist_ok=True)
    held_out, train = found[:unseen], found[unseen:]
    write_jsonl(out / "unseen.jsonl", ({"prompt": text, "label": str(answer)} for text, answer in held_out))
    write_jsonl(out / "train.jsonl", ({"prompt": text, "label": str(answer)} for text, answer in train))
    # Each problem stands in it eight times, with slips of its own: the pupil does not always err at the same ones.
    sloppy = (
        {"prompt": text, "label": str(slip(answer, rng) if rng.random() < slips else answer)}
        for _ in range(8)
        for text, answer in rng.sample(train, len(train))
    )
    write_jsonl(out / "warmup.jsonl", sloppy)
    parameters = make_model(out / "model", seed, hidden_size, layers)
    return {"parameters": parameters, "train": len(train), "unseen": len(held_out)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the arithmetic example's model and data.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    add_arguments(parser)
    args = parser.parse_args()
    kinds = args.kind.split(",")
    try:
        made = prepare(
            args.out, seed=args.seed, kinds=kinds, limit=args.max, unseen=args.unseen, slips=args.slips,
            hidden_size=args.hidden_size, layers=args.layers,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.out}: {made['parameters']:,} parameters, {made['train']} problems, {made['unseen']} unseen ones")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What run.py lets its user choose as well."""
    known = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("--kind", default="add", help=f"kinds of problems, joined by commas ({known})")
    parser.add_argument("--max", type=int, default=100, help="numbers are below this")
    parser.add_argument("--unseen", type=int, default=512, help="problems kept for the evaluation")
    parser.add_argument("--slips", type=float, default=0.66, help="share of wrong answers in the warm-up")
    parser.add_argument("--hidden-size", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split, the weights and the training")


if __name__ == "__main__":
    main()
