from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tiny import make_checkpoint

# One process for all (Megatron takes seconds to import), and not this one: the CPU layer patches torch.cuda.
_RUN = (
    "import sys, json; from vime.cli import main; print(json.dumps([main(argv) for argv in json.loads(sys.argv[1])]))"
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_there_and_back(tmp_path: Path) -> None:
    experts = make_checkpoint(tmp_path / "experts", "qwen3_moe", dtype="bfloat16")
    tied = make_checkpoint(tmp_path / "tied", "llama", tied=True)
    longer = make_checkpoint(tmp_path / "longer", "llama", num_hidden_layers=3)
    commands = []
    for model in (experts, tied):
        commands.append(["convert", model, f"{model}-dist"])
        commands.append(["convert", f"{model}-dist", f"{model}-back", "--hf-checkpoint", model])
    commands.append(["convert", f"{tied}-dist", f"{longer}-back", "--hf-checkpoint", longer])
    commands.append(["convert", tied, f"{tied}-bf16", "--dtype", "bf16"])
    run = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands)], capture_output=True, text=True, timeout=240, check=False
    )
    lines = run.stdout.splitlines()
    assert lines[-1] == "[0, 0, 0, 0, 2, 0]", run.stderr
    assert f"{experts}-dist/iter_0000000" in lines
    assert "num_layers: 2 there, 3 here" in run.stderr
    assert not Path(f"{longer}-back").exists()
    for model in (experts, tied):
        before, after = weights(Path(model)), weights(Path(f"{model}-back"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
        assert (Path(f"{model}-back") / "tokenizer.json").is_file()
