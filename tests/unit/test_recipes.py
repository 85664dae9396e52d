"""README's recipes for a built-in reward and for an estimator, followed to the letter in a copy of vime."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vime
from vime.algorithms.advantages import ESTIMATORS
from vime.config.flags import flags
from vime.config.rollout import LABELLED, MATHEMATICAL, RM_TYPES
from vime.rollout import rewards

README = Path(vime.__file__).parents[1] / "README.md"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(Path(vime.__file__).parent, tmp_path / "vime", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "vime"


def run(copy: Path, code: str) -> None:
    command = [sys.executable, "-c", "import sys\nsys.path.insert(0, sys.argv[1])\n" + code, str(copy.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=copy.parent)
    assert done.returncode == 0, done.stderr


def test_a_reward(copy: Path) -> None:
    for place in ("a file in `vime/rollout/rewards/`, its entry in `rewarder.py` there", "name in `config/rollout.py`"):
        assert place in README.read_text()
    (copy / "rollout/rewards/same.py").write_text("def same(response, label):\n    return float(response == label)\n")
    rewarder = copy / "rollout/rewards/rewarder.py"
    edit(rewarder, '= {"f1": f1}', '= {"f1": f1, "same": same}')
    edit(rewarder, "from vime.types", "from vime.rollout.rewards.same import same\nfrom vime.types")
    edit(copy / "config/rollout.py", '(*MATHEMATICAL, "f1")', '(*MATHEMATICAL, "f1", "same")')
    run(
        copy,
        "import asyncio\n"
        "from vime.config.parse import parse_all\n"
        "from vime.config.check_meaning import check_meaning\n"
        "from vime.rollout.rewards import Rewarder\n"
        "from vime.types import Sample\n"
        "words = '--rm-type same --hf-checkpoint m --rollout-batch-size 1 --n-samples-per-prompt 2 --num-rollout 1'\n"
        "parsed = parse_all((words + ' --prompt-data p').split())\n"
        "assert parsed.problems == []\n"
        "(problem,) = check_meaning(parsed.config)\n"
        "assert '--label-key is missing: --rm-type same compares' in problem\n"
        "parsed.config.data.label_key = 'label'\n"
        "assert check_meaning(parsed.config) == []\n"
        "sample = Sample(0, 0, 'p', [1], label='4', response='4')\n"
        "asyncio.run(Rewarder(parsed.config).score(sample))\n"
        "assert sample.reward == 1\n",
    )


def test_an_estimator(copy: Path) -> None:
    for place in (
        "a file in `vime/algorithms/advantages/`, its entry in `ESTIMATORS`",
        "name in `config/algorithm.py`",
    ):
        assert place in README.read_text()
    (copy / "algorithms/advantages/plain.py").write_text(
        "def plain(options, rewards, group_ids, loss_masks, kl, kl_coef):\n"
        "    return [mask.float() * reward for reward, mask in zip(rewards, loss_masks)]\n"
    )
    table = copy / "algorithms/advantages/__init__.py"
    edit(table, 'ESTIMATORS = {"grpo"', 'ESTIMATORS = {"plain": plain, "grpo"')
    edit(
        table,
        "from vime.algorithms.whiten",
        "from vime.algorithms.advantages.plain import plain\nfrom vime.algorithms.whiten",
    )
    edit(copy / "config/algorithm.py", 'choices=("grpo"', 'choices=("plain", "grpo"')
    run(
        copy,
        "import torch\n"
        "from vime.config.parse import parse_all\n"
        "from vime.config.check_meaning import check_meaning\n"
        "from vime.algorithms import compute_advantages\n"
        "words = '--rm-type random --hf-checkpoint m --rollout-batch-size 2 --num-rollout 1 --prompt-data p'\n"
        "parsed = parse_all((words + ' --advantage-estimator plain').split())\n"
        "assert parsed.problems == check_meaning(parsed.config) == []\n"
        "(one,) = compute_advantages(parsed.config.algorithm, [3.0], [0], [torch.tensor([1, 0])])\n"
        "assert one.tolist() == [3, 0]\n",
    )


def test_every_name_has_its_entry_and_every_entry_its_name() -> None:
    assert set(MATHEMATICAL) == set(rewards.MATHEMATICAL)
    assert set(LABELLED) == {*rewards.MATHEMATICAL, *rewards.COMPARING}
    assert set(RM_TYPES) == {*LABELLED, "random", "remote_rm"}
    assert set(flags()["advantage_estimator"].metadata["choices"]) == set(ESTIMATORS)
