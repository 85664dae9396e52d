"""``--config FILE.yaml``: the same options as on the command line, flat or grouped by topic."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vime.config import foreign
from vime.config.flags import closest, flags, topics


@dataclass(frozen=True)
class Entry:
    """One option of the file: the words that would follow its flag, and where it stands."""

    values: list[Any]
    where: str  # "run.yaml:12"


def read_yaml(path: str) -> tuple[dict[str, Entry], dict[str, Entry], list[str], set[str]]:
    """Read a file of options.

    Returns:
        the options by name, the ``--vllm-X`` ones by X, every problem found, and the names that a misspelt key meant.
    """
    reader = _Reader(Path(path).name)
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        return {}, {}, [f"--config {path}: cannot be read ({error.strerror})"], set(flags())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, {}, [f"--config {path}: not valid YAML ({' '.join(str(error).split())})"], set(flags())
    try:
        if root is not None:
            reader.mapping(root, topic=None)
    except yaml.MarkedYAMLError as error:  # a tag that asks for more than plain data, or a date that is none
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        return {}, {}, [f"{reader.file}:{line}: {error.problem}"], set(flags())
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        return {}, {}, [f"--config {path}: not valid YAML ({error})"], set(flags())
    return reader.options, reader.vllm, reader.problems, reader.meant


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.options: dict[str, Entry] = {}
        self.vllm: dict[str, Entry] = {}
        self.problems: list[str] = []
        self.meant: set[str] = set()

    def mapping(self, node: yaml.Node, topic: str | None) -> None:
        if not isinstance(node, yaml.MappingNode):
            what = f"topic '{topic}'" if topic else "the file"
            self.problems.append(f"{self._where(node)}: {what} must be a mapping of option names to values")
            return
        for key_node, value_node in node.value:
            where = self._where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{where}: an option's name is a word, not a list or a mapping")
                continue
            key = str(key_node.value)
            name = key.removeprefix("--").replace("-", "_")
            grouped = isinstance(value_node, yaml.MappingNode)
            if name == "vllm" and grouped and topic in (None, "rollout"):
                for inner, inner_value in value_node.value:
                    self._engine(str(inner.value), inner_value, self._where(inner))
            elif name in topics() and grouped and topic is None:
                self.mapping(value_node, name)
            elif (
                name in (*topics(), "vllm")
                and topic is None
                and isinstance(value_node, yaml.ScalarNode)
                and value_node.tag == "tag:yaml.org,2002:null"
            ):
                continue  # a topic with everything commented out
            elif name in topics() and name not in flags() and topic is None:
                self.problems.append(f"{where}: {key} is a topic, with options below it, not a value")
            elif name.startswith("vllm_"):
                self._engine(name.removeprefix("vllm_"), value_node, where)
            elif name not in flags():
                self._unknown(key, name, where, topic)
            elif topic and flags()[name].topic != topic:
                self.problems.append(f"{where}: {key} belongs to topic '{flags()[name].topic}', not '{topic}'")
                self.meant.add(name)
            elif name in self.options:
                self.problems.append(f"{where}: {key} stands twice, first at {self.options[name].where}")
            else:
                value = _construct(value_node)
                if value is not None:  # `key:` or null: as if it were not there
                    self.options[name] = Entry(value if isinstance(value, list) else [value], where)

    def _engine(self, name: str, node: yaml.Node, where: str) -> None:
        value = _construct(node)
        name = name.removeprefix("--").replace("_", "-")
        if isinstance(value, bool):
            name, value = (name, []) if value else (f"no-{name}", [])
        elif isinstance(value, dict):
            value = [json.dumps(value)]
        elif value is None:
            return
        words = [str(item) for item in (value if isinstance(value, list) else [value])]
        if name in self.vllm:
            self.problems.append(f"{where}: vllm-{name} stands twice, first at {self.vllm[name].where}")
        self.vllm[name] = Entry(words, where)

    def _unknown(self, key: str, name: str, where: str, topic: str | None) -> None:
        hint = foreign.advice(name)
        if hint is None:
            near = closest(name, [*flags(), *([] if topic else topics())], cutoff=0.7)
            hint = f"did you mean {near}?" if near else "`vime train --help` lists the options"
            self.meant.update([near] if near else difflib.get_close_matches(name, flags()))
        self.problems.append(f"{where}: unknown option {key}: {hint}")

    def _where(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"


def _construct(node: yaml.Node) -> Any:
    """Plain data. Raises YAMLError for anything else."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
