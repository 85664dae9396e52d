"""The folder of checkpoints: whatever moment a crash picks, one complete checkpoint is found."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from vime import files
from vime.backends.megatron_utils import checkpoint_directory
from vime.backends.megatron_utils.checkpoint_directory import LATEST, CheckpointDirectory, torch_dist_checkpoint
from vime.errors import DataError


def write(directory: CheckpointDirectory, step: int, text: str = "weights") -> None:
    with directory.writing(step) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "part").write_text(text)
        (folder / "metadata.json").write_text("{}")


def test_written_checkpoints_are_found_under_megatrons_names(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "new" / "folder")
    assert directory.newest() is None
    write(directory, 3)
    write(directory, 12)
    assert directory.newest() == (12, directory.path / "iter_0000012")
    assert (directory.path / LATEST).read_text() == "12\n"
    assert (directory.path / "iter_0000012" / "sub" / "part").read_text() == "weights"
    assert not list(directory.path.glob("*.tmp"))
    assert torch_dist_checkpoint(directory.path) == directory.path / "iter_0000012"
    assert torch_dist_checkpoint(directory.path / "iter_0000003") == directory.path / "iter_0000003"
    assert torch_dist_checkpoint(tmp_path) is None


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    write(directory, 1)
    with pytest.raises(KeyboardInterrupt), directory.writing(2):
        raise KeyboardInterrupt
    assert directory.newest() == (1, tmp_path / "iter_0000001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", LATEST]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def test_a_crash_at_any_step_of_the_writing_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the calls that change the disk while writing checkpoint 2 (new name) and 1 again (old name), then die
    before each of them in turn: newest() finds a checkpoint whose content is all old or all new."""
    calls = [(os, "rename"), (os, "replace"), (files.shutil, "rmtree"), (os, "fsync"), (Path, "mkdir")]
    real = {(owner, name): getattr(owner, name) for owner, name in calls}

    def run(step: int, folder: Path, die_at: int) -> int:
        count = 0

        def wrap(key: tuple[object, str]):
            def call(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count >= die_at:  # and every later one: a dead process does not clean up either
                    raise Killed
                return real[key](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, wrap((owner, name)))
            with contextlib.suppress(Killed):
                write(CheckpointDirectory(folder), step, "new")
        return count

    for step in (2, 1):
        steps = run(step, prepared(tmp_path / f"count{step}"), die_at=10**9)
        assert steps > 8
        for die_at in range(1, steps + 1):
            folder = prepared(tmp_path / f"{step}-{die_at}")
            run(step, folder, die_at)
            found = CheckpointDirectory(folder).newest()
            assert found is not None, (step, die_at)
            text = (found[1] / "sub" / "part").read_text()
            assert text in (("new",) if found[0] == 2 else ("old", "new")), (step, die_at)
            write(CheckpointDirectory(folder), 5)  # and the next run can write
            assert CheckpointDirectory(folder).newest() == (5, folder / "iter_0000005")


def prepared(folder: Path) -> Path:
    write(CheckpointDirectory(folder), 1, "old")
    return folder


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_broken_checkpoints_are_passed_over(tmp_path: Path, damage: str) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3):
        write(directory, step)
    part = tmp_path / "iter_0000003" / "sub" / "part"
    if damage == "truncated":
        part.write_text("weig")
    elif damage == "missing":
        part.unlink()
    else:
        (tmp_path / "iter_0000003" / checkpoint_directory.MANIFEST).write_text('{"step": 3, "fil')
    assert directory.newest() == (2, tmp_path / "iter_0000002")


def test_the_text_file_decides_where_it_can(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3):
        write(directory, step)
    (tmp_path / LATEST).write_text("1")
    assert directory.newest() == (1, tmp_path / "iter_0000001")
    for text in ("99", "release", ""):
        (tmp_path / LATEST).write_text(text)
        assert directory.newest() == (3, tmp_path / "iter_0000003")


def test_prune_keeps_the_last_written_and_strangers(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    (tmp_path / "iter_0000000").mkdir()
    (tmp_path / "iter_0000000" / "mine.txt").write_text("a stranger's")
    for step in (50, 1, 2, 3):  # 50 lies there from an older run
        write(directory, step)
    assert [path.name for path in directory.prune(2)] == ["iter_0000050", "iter_0000001"]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000000", "iter_0000002", "iter_0000003"]
    (tmp_path / LATEST).write_text("2")
    assert directory.prune(1) == []  # 2 is what a run would continue from, 3 is the last written
    with pytest.raises(ValueError, match="at least one"):
        directory.prune(0)


def test_what_is_passed_over_is_named(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3):
        write(directory, step)
    assert directory.damaged() == []
    (directory.path_of(3) / "sub" / "part").write_text("half")
    assert directory.damaged() == ["iter_0000003"]
    (tmp_path / LATEST).write_text("1")  # somebody goes back in time: 2 is whole
    assert directory.damaged() == ["iter_0000003"]
    assert CheckpointDirectory(tmp_path / "none").damaged() == []


def test_a_path_that_is_no_folder_has_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert CheckpointDirectory(tmp_path / "file").newest() is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"cannot write checkpoints to .*file"),
        CheckpointDirectory(tmp_path / "file").writing(1),
    ):
        pass
