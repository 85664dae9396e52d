"""Prompt files: JSONL or Parquet, one prompt per row, read and checked without torch or transformers.

``path@[a:b]`` takes rows a to b - 1 (Python's slices: either bound may be left out or negative). In a message, a JSONL
row has its line number and a Parquet row its position, both counted from 1.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vime.config.rollout import RM_TYPES, DataOptions
from vime.errors import DataError

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]$")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, checked. ``where`` names it in messages: ``file.jsonl:17``."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None


def split_slice(path: str) -> tuple[str, slice]:
    """``"data.jsonl@[10:]"`` -> ``("data.jsonl", slice(10, None))``."""
    match = _SLICE.match(path)
    if match is None:
        if "@[" in path:
            raise DataError(f"{path}: a slice is written path@[a:b], for example {path.split('@[')[0]}@[0:1000]")
        return path, slice(None)
    start, stop = (_bound(match[end]) for end in ("start", "stop"))
    return match["path"], slice(start, stop)


def _bound(text: str) -> int | None:
    # Beyond the end of any file is the end.
    return max(-sys.maxsize, min(int(text[:40]), sys.maxsize)) if text else None


def read_prompts(path: str, options: DataOptions, *, sft: bool = False) -> Iterator[Row]:
    """Rows of a prompt file in their order.

    Args:
        path: file, with or without a slice.
        options: which columns are read.
        sft: the rows hold the answers too (``--loss-type sft_loss``).

    Raises:
        DataError: the file, a column or the first bad row, by line.
    """
    file, rows = split_slice(path)
    if not os.path.isfile(file):
        raise DataError(f"{file}: {'not a file' if os.path.exists(file) else 'no such file'}")
    empty = True
    read = _read_parquet if file.endswith(_PARQUET) else _read_jsonl
    try:
        for where, row in read(file, rows, options):
            empty = False
            yield _check(where, row, options, sft)
    except OSError as error:  # no permission, a damaged page of a Parquet file, a disk that fails
        raise DataError(f"{file}: cannot be read ({error.strerror or ' '.join(str(error).split())})") from error
    if empty:
        raise DataError(f"{path}: no rows" + ("" if file == path else " in this slice"))


def validate_prompt_file(path: str, options: DataOptions, *, sft: bool = False) -> list[str]:
    """What is wrong with a prompt file: its first bad row, or nothing."""
    try:
        for _ in read_prompts(path, options, sft=sft):
            pass
    except DataError as error:
        return [str(error)]
    return []


def _take(rows: Iterable[Any], part: slice) -> Iterable[Any]:
    """Like ``list(rows)[part]``; holds them all only where a bound counts from the end."""
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        return list(rows)[part]
    return itertools.islice(rows, part.start, part.stop)


def _read_jsonl(file: str, part: slice, options: DataOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(file, "rb") as stream:
        lines = ((number, line) for number, line in enumerate(stream, 1) if line.strip())
        for number, line in _take(lines, part):
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
                raise DataError(f"{where}: not a JSON object ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{where}: a row is a JSON object, this is {_kind(row)}")
            yield where, row


def _read_parquet(file: str, part: slice, options: DataOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a Parquet file ({error})") from error
    with parquet:
        present = parquet.schema_arrow.names
        wanted = [name for name in _columns(options) if name in present]
        for name in _required(options):
            if name not in present:
                raise DataError(f"{file}: no column '{name}'; it has {', '.join(present)}")
        chosen = range(parquet.metadata.num_rows)[part]
        position = 0
        for batch in parquet.iter_batches(batch_size=1024, columns=wanted):
            if position >= chosen.stop:
                break
            if position + batch.num_rows > chosen.start:
                for offset, row in enumerate(batch.to_pylist()):
                    if position + offset in chosen:
                        yield f"{file}: row {position + offset + 1}", row
            position += batch.num_rows


def _columns(options: DataOptions) -> list[str]:
    keys = (options.input_key, options.label_key, options.metadata_key, options.tool_key)
    return list(dict.fromkeys(key for key in keys if key))


def _required(options: DataOptions) -> dict[str, str]:
    """Columns that every row must have, and the option that names each; metadata and tools may be absent."""
    keys = {options.input_key: "--input-key"}
    if options.label_key:
        keys[options.label_key] = "--label-key"
    return keys


def _check(where: str, row: dict[str, Any], options: DataOptions, sft: bool) -> Row:
    for key, flag in _required(options).items():
        if row.get(key) is None:
            raise DataError(f"{where}: no '{key}' ({flag}); the row has {', '.join(row) or 'nothing'}")
    prompt = row[options.input_key]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: '{options.input_key}' is empty")
    else:
        prompt = _messages(where, prompt, options)
    if sft and options.label_key is None and (isinstance(prompt, str) or prompt[-1]["role"] != "assistant"):
        raise DataError(
            f"{where}: nothing to learn: '{options.input_key}' does not end with an assistant message and there is no "
            "--label-key"
        )
    metadata = _decoded(where, options.metadata_key, row.get(options.metadata_key), dict) or {}
    reward = metadata.get("rm_type")
    if reward is not None and reward not in RM_TYPES:
        raise DataError(f"{where}: '{options.metadata_key}' asks for rm_type {reward!r:.60}, not {', '.join(RM_TYPES)}")
    for key, value in ((options.input_key, prompt), (options.label_key, row.get(options.label_key or ""))):
        if not _encodable(value):
            raise DataError(f"{where}: '{key}' holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
    tools = _decoded(where, options.tool_key, row.get(options.tool_key), list) if options.tool_key else None
    return Row(where, prompt, row[options.label_key] if options.label_key else None, metadata, tools or None)


def _messages(where: str, prompt: Any, options: DataOptions) -> list[dict[str, Any]]:
    key = options.input_key
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: '{key}' must be a string or a list of chat messages, this is {_kind(prompt)}")
    if not options.apply_chat_template:
        raise DataError(f"{where}: '{key}' is a list of chat messages, which needs --apply-chat-template")
    messages = []
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} of '{key}' must be an object with a 'role': {message!r:.60}")
        # Parquet fills keys that other rows have with None; chat templates ask whether a key is there.
        message = {name: value for name, value in message.items() if value is not None}
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where}: message {number} of '{key}' (role {message['role']}) has no 'content'")
        messages.append(message)
    return messages


def _encodable(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(map(_encodable, value.values()))
    return not isinstance(value, list) or all(map(_encodable, value))


def _decoded(where: str, key: str, value: Any, kind: type) -> Any:
    """A dictionary or list, which Parquet files often hold as a JSON string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: '{key}' is a string but not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        name = {dict: "an object", list: "a list"}[kind]
        raise DataError(f"{where}: '{key}' must be {name}, this is {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    names |= {type(None): "null", bytes: "binary"}
    return f"{names.get(type(value), type(value).__name__)} ({value!r:.60})"
