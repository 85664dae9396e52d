from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_checkpoint
from vime import cli


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "bfloat16"), ("llama", "float32")])
def test_there_and_back(tmp_path: Path, family: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", family, dtype=dtype, tied=family == "llama")
    assert cli.main(["convert", model, str(tmp_path / "dist")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "dist" / "iter_0000000")
    back = tmp_path / "back"
    assert cli.main(["convert", str(tmp_path / "dist"), str(back), "--hf-checkpoint", model]) == 0
    before, after = weights(Path(model)), weights(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    assert (back / "tokenizer.json").is_file()


def test_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    other = make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=3)
    assert cli.main(["convert", model, str(tmp_path / "dist")]) == 0
    assert cli.main(["convert", str(tmp_path / "dist"), str(tmp_path / "back"), "--hf-checkpoint", other]) == 2
    assert "num_layers: 2 there, 3 here" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
