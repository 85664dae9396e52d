"""The folder that holds a run's checkpoints, in Megatron-LM's names. For the driver: needs neither torch nor Megatron.

::

    DIR/iter_0000003/                        complete; vime_checkpoint.json lists its files and their sizes
    DIR/iter_0000006.tmp/                    being written, or left by a crash
    DIR/iter_0000003.old/                    being replaced by a new iter_0000003
    DIR/latest_checkpointed_iteration.txt    "3"
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.errors import DataError
from vime.files import publish_directory, recover_directory, write_text

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "vime_checkpoint.json"
_MEGATRON_METADATA = "metadata.json"  # the last file that Megatron's torch_dist writer writes
_NAME = re.compile(r"iter_(\d{7,})\Z")


class CheckpointDirectory:
    """``--save`` and ``--load``. A step is the number of rollouts that the weights have learned from."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def path_of(self, step: int) -> Path:
        return self.path / f"iter_{step:07d}"

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A fresh directory to write to; it gets its name when the block ends without an error, else it is removed.

        At any moment a crash leaves the previous checkpoint, or this one, complete and found by :meth:`newest`.

        Raises:
            DataError: the folder cannot be written to.
        """
        final = self.path_of(step)
        aside = final.with_name(final.name + ".tmp")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
        except OSError as error:
            raise DataError(f"cannot write checkpoints to {self.path}: {error}") from error
        try:
            yield aside
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            sizes = {path.relative_to(aside).as_posix(): path.stat().st_size for path in files}
            write_text(aside / MANIFEST, json.dumps({"step": step, "files": sizes}, indent=1) + "\n")
            publish_directory(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        write_text(self.path / LATEST, f"{step}\n")

    def newest(self) -> tuple[int, Path] | None:
        """(step, directory) to continue from, None where there is no complete checkpoint.

        That is the one latest_checkpointed_iteration.txt names, as in Megatron-LM: editing it goes back in time. Where
        the file or what it names is missing or broken, it is the complete checkpoint with the highest step.
        """
        for path in self.path.glob("iter_*.old"):
            recover_directory(path.with_suffix(""))
        named = self._latest()
        if named is not None and is_complete(self.path_of(named)):
            return named, self.path_of(named)
        complete = [(step, path) for step, path in self._all() if is_complete(path)]
        return max(complete) if complete else None

    def damaged(self) -> list[str]:
        """Names of checkpoints above the one to continue from that are not whole, and so are passed over."""
        newest = self.newest()
        return [
            path.name for step, path in self._all() if (newest is None or step > newest[0]) and not is_complete(path)
        ]

    def prune(self, keep: int) -> list[Path]:
        """Remove all but the ``keep`` complete checkpoints written last; return what was removed. The one to continue
        from always stays, and so does whatever does not look like a checkpoint of ours."""
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        newest = self.newest()
        # By time, not by step: a run that started again in an old folder has lower steps than what lies there.
        ours = sorted(
            (path for _, path in self._all() if (path / MANIFEST).is_file()),
            key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name),
        )
        removed = [path for path in ours[:-keep] if newest is None or path != newest[1]]
        for path in removed:
            shutil.rmtree(path)
        return removed

    def _latest(self) -> int | None:
        try:
            text = (self.path / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):  # not there, or the path is no folder
            return None
        return int(text) if text.isdecimal() and len(text) < 20 else None

    def _all(self) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        matches = [(_NAME.match(path.name), path) for path in self.path.iterdir() if path.is_dir()]
        return sorted((int(match[1]), path) for match, path in matches if match)


def is_complete(path: Path) -> bool:
    """All files are there with the sizes they were written with (of Megatron-LM's own: its metadata is there)."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return (path / _MEGATRON_METADATA).is_file()
    try:
        sizes = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def torch_dist_checkpoint(path: str | Path) -> Path | None:
    """The torch_dist checkpoint that ``path`` is or, as a folder of checkpoints, would continue from; else None."""
    path = Path(path)
    for folder in (path, path / "release"):  # "release": Megatron-LM's name for converted weights
        if (folder / _MEGATRON_METADATA).is_file():
            return folder
    newest = CheckpointDirectory(path).newest()
    return newest[1] if newest is not None and (newest[1] / _MEGATRON_METADATA).is_file() else None
