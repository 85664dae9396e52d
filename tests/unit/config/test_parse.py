from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vime.config import Config
from vime.config.flags import Flag, closest, flags, topics, value_of
from vime.config.parse import parse, parse_all
from vime.errors import ConfigError

NEEDED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]


def problems(*words: str) -> list[str]:
    return parse_all([*NEEDED, *words]).problems


def sample(flag: Flag) -> Any:
    """A value that the flag allows and that is not its default."""
    if flag.type is bool:
        return True
    if flag.type is dict:
        return {"enable_thinking": False}
    if flag.metadata["choices"]:
        other = [choice for choice in flag.metadata["choices"] if choice != flag.default]
        value: Any = (other or list(flag.metadata["choices"]))[0]
    elif flag.item is int:
        value = 3
    elif flag.item is float:
        high, low = flag.metadata["maximum"], flag.metadata["above"]
        value = 1.0 if flag.name == "rotary_percent" else 0.25 if high else 0.5 + (low or 0)
    else:
        value = "some.text"
    return [value, value] if flag.type is list else value


def words_of(flag: Flag, value: Any) -> list[str]:
    if flag.type is bool:
        return [flag.text]
    if flag.type is list:
        return [flag.text, *map(str, value)]
    return [flag.text, json.dumps(value) if flag.type is dict else str(value)]


@pytest.mark.parametrize("flag", flags().values(), ids=lambda flag: flag.name)
def test_every_option_says_the_same_on_the_command_line_and_in_yaml(flag: Flag, tmp_path: Path) -> None:
    value = sample(flag)
    rest = [] if flag.required else NEEDED
    if flag.required:
        rest = [
            word
            for name in flags()
            if flags()[name].required and name != flag.name
            for word in (flags()[name].text, "4")
        ]
    by_flag = parse([*rest, *words_of(flag, value)])
    assert value_of(by_flag, flag.name) == value
    assert flag.name in by_flag.given
    for document in ({flag.name: value}, {flag.text[2:]: value}, {flag.topic: {flag.text[2:]: value}}):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(document))
        assert parse([*rest, "--config", str(file)]) == by_flag


def test_topics_hold_all_options() -> None:
    assert {flag.topic for flag in flags().values()} == set(topics())
    assert all(flag.help for flag in flags().values())


def test_equals_sign_lists_negative_numbers_and_json() -> None:
    config = parse(
        [
            *[*NEEDED, "--rollout-top-k", "-1", "--lr=1e-5", "--rollout-stop", "</a>", "stop here"],
            *["--apply-chat-template-kwargs", '{"enable_thinking": false}'],
        ]
    )
    assert config.rollout.rollout_top_k == -1
    assert config.optimizer.lr == 1e-5
    assert config.rollout.rollout_stop == ["</a>", "stop here"]
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_three_answers_of_an_optional_switch() -> None:
    assert parse(NEEDED).cluster.offload_train is None
    assert parse([*NEEDED, "--offload-train"]).cluster.offload_train is True
    assert parse([*NEEDED, "--no-offload-train"]).cluster.offload_train is False
    assert problems("--offload-train", "--no-offload-train") == [
        "--offload-train is given twice: '--offload-train' and '--no-offload-train'; keep one"
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--lr x", "--lr x: not a number"),
        ("--lr nan", "--lr nan: must be finite"),
        ("--lr -1", "--lr -1.0: must be at least 0"),
        ("--num-rollout 1.5", "--num-rollout 1.5: not a whole number"),
        ("--num-rollout -3", "--num-rollout -3: must be at least 0"),
        ("--seed 99999999999999999999", "--seed 99999999999999999999: beyond what 64 bits hold"),
        ("--vllm-max-num-seqs 3 --vllm-max_num_seqs 4", "--vllm-max-num-seqs is given twice"),
        ("--vllm-enforce-eager --vllm-no-enforce-eager", "--vllm-enforce-eager is given twice"),
        ("--eps-clip-c 1", "--eps-clip-c 1.0: must be greater than 1"),
        ("--adam-beta1 9", "--adam-beta1 9.0: must be at most 1"),
        ("--colocate 4", "--colocate is a switch and takes no value, but '4' follows it"),
        ("--save a b", "--save takes one value, but got 2: 'a' 'b' (quote a value that has spaces in it)"),
        ("--rm-type deepscale", "did you mean deepscaler?"),
        ("--apply-chat-template-kwargs {x", "--apply-chat-template-kwargs {x: not valid JSON"),
        ("--apply-chat-template-kwargs [1]", "must be a JSON object"),
        ("--rollout-stop-token-ids 1 two", "--rollout-stop-token-ids two: not a whole number"),
        ("--no-colocate", "leave --colocate out; where a --config file sets it, '--colocate false' takes it back"),
        ("-lr 1", "unknown flag -lr: flags are written with two dashes and hyphens: --lr"),
        ("--rollout-batch 8", "unknown flag --rollout-batch: did you mean --rollout-batch-size?"),
        ("--tp 8", "unknown flag --tp: write --tensor-model-parallel-size"),
        ("--bf16", "unknown flag --bf16: write --dtype bf16"),
        ("--sglang-mem-fraction-static 0.7", "write --vllm-gpu-memory-utilization"),
        ("--qwertyuiop 8", "unknown flag --qwertyuiop: `vime train --help` lists the flags"),
        ("--lr 1 --lr 2", "--lr is given twice: '--lr 1' and '--lr 2'; keep one"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_one_problem_and_its_words(words: str, problem: str) -> None:
    (said,) = problems(*words.split())
    assert problem in said


def test_words_before_any_flag() -> None:
    assert parse_all(["model", *NEEDED]).problems == ["'model' stands where a flag was expected"]


def test_a_flag_and_its_value_quoted_into_one_word() -> None:
    (said,) = problems("--save", "--lr 1e-6")
    assert said == "--save is followed by '--lr 1e-6': a flag and its value were quoted into one word"


@pytest.mark.parametrize("flag", [flag for flag in flags().values() if flag.type is str], ids=lambda flag: flag.name)
@pytest.mark.parametrize("text", ["", " ", "a\0b"])
def test_no_text_is_empty_or_holds_a_null_character(flag: Flag, text: str) -> None:
    (said,) = [problem for problem in parse_all([flag.text, text]).problems if flag.text in problem]
    assert said.startswith(f"{flag.text} {text!r} ") or "must be one of" in said
    assert "is missing" not in said


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--lr", "x", "--colocat", "--num-rollout", "1", "--num-rollout", "2"])
    assert len(caught.value.problems) == 5  # and the two required options


def test_no_abbreviations() -> None:
    assert problems("--num-roll", "3") == ["unknown flag --num-roll: did you mean --num-rollout?"]


def test_what_follows_from_an_unreadable_option_is_not_said() -> None:
    parsed = parse_all([*NEEDED, "--colocat", "--lr", "x"])
    told = ["--offload means nothing without --colocate", "--lr-warmup-init is too large", "--lr is too large"]
    assert parsed.believable(told) == ["--lr-warmup-init is too large"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("rollout-batch", "rollout-batch-size"), ("rollout_temprature", "rollout-temperature"), ("x", None)],
)
def test_closest(word: str, meant: str | None) -> None:
    assert closest(word, [flag.text[2:] for flag in flags().values()], cutoff=0.75) == meant


def test_every_deadline_has_a_longest_one() -> None:
    """Sockets and timers overflow otherwise, each at its own number and in its own words."""
    deadlines = [flag for flag in flags().values() if flag.text.endswith("-timeout")]
    assert len(deadlines) >= 6
    for flag in deadlines:
        for value in ("1e10", "1e308"):
            assert f"{flag.text} {float(value)}: must be at most 604800.0" in problems(flag.text, value)


def test_config_is_plain_data() -> None:
    import dataclasses
    import pickle

    config = parse([*NEEDED, "--vllm-enforce-eager"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert json.loads(json.dumps(dataclasses.asdict(config)))["rollout"]["vllm"] == {"enforce-eager": True}
    assert isinstance(config, Config)
