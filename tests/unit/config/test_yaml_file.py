from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vime.config.parse import Parsed, parse_all


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Parsed]:
    def read(text: str, *words: str) -> Parsed:
        (tmp_path / "run.yaml").write_text(text)
        return parse_all(["--config", str(tmp_path / "run.yaml"), *words])

    return read


GOOD = """
# a run
hf-checkpoint: models/tiny
rollout:
  rollout-batch-size: 4
  rollout_temperature: 1      # a whole number where a real one is meant
  rollout-stop: ["a", 3]
optimizer:
  optimizer: adam
  lr: 1e-6                    # YAML 1.1 reads a text here
train:                        # everything below it is commented out
colocate: true
num_epoch:                    # as if it were not there
vllm:
  max_num_seqs: 64
  enable-prefix-caching: false
  compilation-config: {level: 3}
vllm-enforce-eager: true
"""


def test_flat_and_grouped(read: Callable[..., Parsed]) -> None:
    parsed = read(GOOD)
    assert parsed.problems == []
    config = parsed.config
    assert (config.checkpoint.hf_checkpoint, config.rollout.rollout_batch_size) == ("models/tiny", 4)
    assert (config.optimizer.lr, config.rollout.rollout_temperature) == (1e-6, 1.0)
    assert config.rollout.rollout_stop == ["a", "3"]
    assert config.cluster.colocate
    assert config.rollout.num_epoch is None
    assert "num_epoch" not in config.given
    assert config.rollout.vllm == {
        "max-num-seqs": "64",
        "no-enable-prefix-caching": True,
        "compilation-config": '{"level": 3}',
        "enforce-eager": True,
    }


def test_the_command_line_wins(read: Callable[..., Parsed]) -> None:
    parsed = read(
        GOOD, "--lr", "1e-4", "--colocate", "false", "--vllm-max-num-seqs", "8", "--vllm-enable-prefix-caching"
    )
    assert parsed.problems == []
    assert parsed.config.optimizer.lr == 1e-4
    assert not parsed.config.cluster.colocate
    assert parsed.config.rollout.vllm["max-num-seqs"] == "8"
    assert parsed.config.rollout.vllm["enable-prefix-caching"] is True
    assert "no-enable-prefix-caching" not in parsed.config.rollout.vllm


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("num-rolout: 3", "run.yaml:3: unknown option num-rolout: did you mean num_rollout?"),
        ("rolout: {num-rollout: 3}", "run.yaml:3: unknown option rolout: did you mean rollout?"),
        ("tp: 3", "run.yaml:3: unknown option tp: write --tensor-model-parallel-size"),
        ("rollout: {lr: 3}", "run.yaml:3: lr belongs to topic 'optimizer', not 'rollout'"),
        ("rollout: 5", "run.yaml:3: rollout is a topic, with options below it, not a value"),
        ("hf_checkpoint: other", "run.yaml:3: hf_checkpoint stands twice, first at run.yaml:1"),
        ("lr: fast", "run.yaml:3: --lr fast: not a number"),
        ("lr: true", "run.yaml:3: --lr True: not a number"),
        ("colocate: maybe", "run.yaml:3: --colocate is a switch and takes no value, but 'maybe' follows it"),
        ("rollout-stop: [[a]]", "run.yaml:3: --rollout-stop ['a']: not a text"),
        ("vllm-max-num-sqs: 3", "did you mean --vllm-max-num-seqs?"),
        ("{", "not valid YAML"),
        ("num-rollout: " + "1" * 5000, "not valid YAML (Exceeds the limit"),
        ("lr: " + "[" * 3000 + "]" * 3000, "not valid YAML (maximum recursion depth"),
        ("[lr, seed]: 1", "run.yaml:3: an option's name is a word, not a list or a mapping"),
    ],
)
def test_one_problem_and_where_it_stands(read: Callable[..., Parsed], line: str, problem: str) -> None:
    (said,) = read(f"hf-checkpoint: model\nrollout-batch-size: 4\n{line}\n").problems
    assert problem in said


def test_topics_without_options_and_no_engine_options(read: Callable[..., Parsed]) -> None:
    assert read("hf-checkpoint: model\nrollout-batch-size: 4\noptimizer:\nvllm:\n").problems == []


def test_not_a_mapping(read: Callable[..., Parsed]) -> None:
    said = read("- lr\n", "--hf-checkpoint", "m", "--rollout-batch-size", "4").problems
    assert said == ["run.yaml:1: the file must be a mapping of option names to values"]


def test_no_code_in_yaml(read: Callable[..., Parsed]) -> None:
    (said,) = read("hf-checkpoint: m\nrollout-batch-size: 4\nlr: !!python/object/apply:os.getpid []\n").problems
    assert "run.yaml:3" in said
