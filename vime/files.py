"""Files that survive a crash at any moment: written aside, flushed to the disk, then renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.errors import ConfigError


def sync_file(path: str | Path) -> None:
    """Return only when the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str | Path) -> None:
    """The same for a directory's list of names: what makes a creation or a rename in it last."""
    sync_file(path)


def sync_tree(path: str | Path) -> None:
    """Flush every file and directory at and below ``path``."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_directory(folder)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file's content in one step: a reader, also after a crash, sees the old text or the new one."""
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_directory(path.parent)


@contextmanager
def claimed(folder: str | Path, flag: str) -> Iterator[None]:
    """Within: ``folder``, which is there, is this process's to write in. The claim ends with the process at the latest.

    Raises:
        ConfigError: another process has claimed it; names ``flag``.
    """
    file = open(Path(folder) / ".claimed", "a+", encoding="utf-8")  # noqa: SIM115 - closed below, with the claim
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                [f"{flag} {folder}: another run (pid {file.read().strip()}) is writing there; choose another directory"]
            ) from error
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
    finally:
        file.close()


def publish_directory(aside: str | Path, final: str | Path) -> None:
    """Give a directory that was written aside its final name; a directory of that name is replaced.

    Renaming over a directory that is not empty is not possible in one step, so the old one is moved to ``NAME.old``
    first and removed last: a crash in between leaves the old one complete under one of the two names, and
    :func:`recover_directory` gives it back its own.
    """
    aside, final = Path(aside), Path(final)
    sync_tree(aside)
    old = _old(final)
    if final.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(final, old)
    os.rename(aside, final)
    sync_directory(final.parent)
    if old.exists():
        shutil.rmtree(old)


def recover_directory(final: str | Path) -> None:
    """Undo a replacement that a crash interrupted between its two renames."""
    final = Path(final)
    if not final.exists() and _old(final).exists():
        os.rename(_old(final), final)


def _old(final: Path) -> Path:
    return final.with_name(final.name + ".old")
