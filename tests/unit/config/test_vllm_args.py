from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vime.backends.vllm_utils.command import OWNED_FLAGS
from vime.config.vllm_args import RESERVED, check_engine_options, engine_options

pytest.importorskip("vllm")

_ASK_VLLM = """
import argparse, json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
found = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    switch = isinstance(action, (argparse._StoreTrueAction, argparse.BooleanOptionalAction))
    choices = [str(choice) for choice in action.choices] if action.choices else None
    kind = getattr(action.type, "__name__", None)
    for name in action.option_strings:
        if name.startswith("--"):
            found[name[2:]] = [switch, choices, kind, action.nargs]
print("\\n" + json.dumps(found))
"""


def test_the_options_are_those_of_vllms_own_parser() -> None:
    """Contract with vLLM's sources: when its layout moves, this fails first."""
    run = subprocess.run([sys.executable, "-c", _ASK_VLLM], capture_output=True, text=True, timeout=240, check=True)
    theirs = json.loads(run.stdout.strip().splitlines()[-1])
    ours = engine_options()
    assert ours is not None
    del theirs["help"]
    missing = [n for n in theirs if n not in ours and not (n.startswith("no-") and ours[n[3:]].kind == "switch")]
    assert not missing
    assert not set(ours) - set(theirs)
    for name, option in ours.items():
        switch, choices, kind, nargs = theirs[name]
        assert (option.kind == "switch") == switch, name
        if option.kind == "choice":  # whatever is refused here is refused by vLLM
            assert set(choices) - {"None"} <= set(option.choices), name
        if option.kind in ("int", "float"):
            allowed = {option.kind, f"human_readable_{option.kind}", "human_readable_int_or_auto", "_optional_type"}
            assert kind in allowed, name
        if nargs == "+":
            assert option.kind == "list", name


def test_what_the_engine_command_owns_is_refused_here() -> None:
    assert set(OWNED_FLAGS) <= set(RESERVED)
    options = engine_options()
    assert options is not None
    assert {name for name in RESERVED if name not in options} <= {"grpc-port", "enable-scale-out"}  # newer than 0.26


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max-num-seq", "3", "has no option --max-num-seq; did you mean --vllm-max-num-seqs?"),
        ("qwertyuiop", True, "has no option --qwertyuiop; `vllm serve --help=all` lists its options"),
        ("max-num-seqs", "many", "--vllm-max-num-seqs many: not a whole number"),
        ("max-num-seqs", True, "--vllm-max-num-seqs needs a value"),
        ("max-num-seqs", ["3", "4"], "--vllm-max-num-seqs takes one value, but got 2: 3 4"),
        ("gpu-memory-utilization", "half", "--vllm-gpu-memory-utilization half: not a number"),
        ("enforce-eager", "true", "--vllm-enforce-eager is a switch and takes no value, but got 'true'"),
        ("no-enforce-eager", "x", "--vllm-no-enforce-eager is a switch"),
        ("kv-cache-dtype", "fp9", "must be one of auto, "),
        ("compilation-config", '{"level": 3', "not valid JSON"),
        ("tensor-parallel-size", "2", "is vime's to set: --rollout-num-gpus-per-engine"),
        ("model", "x", "is vime's to set: --hf-checkpoint"),
        ("no-enable-sleep-mode", True, "is vime's to set: --colocate turns it on"),
        ("data-parallel-rank", "1", "is vime's to set: --rollout-num-gpus"),
    ],
)
def test_refused(name: str, value: str | bool | list[str], problem: str) -> None:
    (said,) = check_engine_options({name: value})
    assert problem in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max-num-seqs", "64"),
        ("max-num-batched-tokens", "16k"),
        ("kv-cache-memory-bytes", "1G"),
        ("gpu-memory-utilization", "0.7"),
        ("enforce-eager", True),
        ("no-enable-prefix-caching", True),
        ("kv-cache-dtype", "fp8"),
        ("compilation-config.level", "3"),
        ("compilation-config", '{"level": 3}'),
        ("cudagraph-capture-sizes", ["1", "2", "4"]),
        ("uvicorn-log-level", "warning"),
        ("trust-remote-code", True),
    ],
)
def test_accepted(name: str, value: str | bool | list[str]) -> None:
    assert check_engine_options({name: value}) == []
