"""From the words of a command line (and a YAML file) to a :class:`Config`, with every problem found on the way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.config import Config, foreign
from vime.config.flags import Flag, closest, flags, topics
from vime.config.vllm_args import check_engine_options
from vime.config.yaml_file import read_yaml
from vime.errors import ConfigError
from vime.masking import OF_ENGINES, masked_words


def parse(argv: Sequence[str]) -> Config:
    """Read the options of a run.

    Raises:
        ConfigError: unknown, repeated, missing or malformed options; all of them at once.
    """
    result = parse_all(argv)
    if result.problems:
        raise ConfigError(result.problems)
    return result.config


@dataclass
class Parsed:
    """What could be read, and what could not."""

    config: Config
    problems: list[str]
    unsure: set[str] = field(default_factory=set)  # options whose value in ``config`` is a stand-in

    def believable(self, problems: Sequence[str]) -> list[str]:
        """Those of a check's problems that do not merely follow from an option that could not be read."""
        texts = [flags()[name].text for name in self.unsure if name in flags()]
        return [problem for problem in problems if not any(_mentions(problem, text) for text in texts)]


def parse_all(argv: Sequence[str]) -> Parsed:
    """Like :func:`parse`, but hands back what could be read beside the problems, so that ``check`` can go on."""
    words = _Words(argv)
    problems, unsure = list(words.problems), set(words.meant)
    file_options, file_engine = {}, {}
    if words.config_file is not None:
        file_options, file_engine, file_problems, meant = read_yaml(words.config_file)
        problems += file_problems
        unsure |= meant

    values: dict[str, Any] = {}
    for name, flag in flags().items():
        where = ""
        if name in words.options:
            given = words.options[name]
        elif name in file_options:
            given, where = file_options[name].values, f"{file_options[name].where}: "
        else:
            continue
        try:
            values[name] = given if isinstance(given, bool) else flag.convert(given)
        except ValueError as error:
            problems.append(f"{where}{error}")
            unsure.add(name)

    missing = [flag for flag in flags().values() if flag.required and flag.name not in values]
    problems += [f"{flag.text} is missing: {flag.help}" for flag in missing if flag.name not in unsure]
    unsure |= {flag.name for flag in missing}

    engine = {name: _engine_value(entry.values) for name, entry in file_engine.items()}
    for name, given in words.engine.items():
        engine.pop(name.removeprefix("no-") if name.startswith("no-") else f"no-{name}", None)
        engine[name] = _engine_value(given)
    problems += check_engine_options(engine)
    return Parsed(_build(values, engine), problems, unsure)


def _build(values: dict[str, Any], engine: dict[str, Any]) -> Config:
    parts: dict[str, Any] = {}
    for topic, owner in topics().items():
        chosen: dict[str, Any] = {}
        for flag in flags().values():
            if flag.topic == topic and flag.name in values:
                chosen[flag.name] = values[flag.name]
            elif flag.topic == topic and flag.required:
                chosen[flag.name] = _stand_in(flag)
        parts[topic] = owner(**chosen)
    parts["rollout"].vllm = engine
    return Config(**parts, given=sorted(values))


def _stand_in(flag: Flag) -> Any:
    return {str: "", int: 1, float: 1.0}[flag.type]


def _engine_value(words: Sequence[str]) -> str | bool | list[str]:
    if not words:
        return True
    return words[0] if len(words) == 1 else list(words)


def _mentions(text: str, flag: str) -> bool:
    start = text.find(flag)
    while start >= 0:
        following = text[start + len(flag) : start + len(flag) + 1]
        if not (following.isalnum() or following == "-"):
            return True
        start = text.find(flag, start + 1)
    return False


class _Collect(argparse.Action):
    """Keeps every occurrence of a flag with the words after it; what they mean is decided later, all together."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.seen.append((option_string, list(values)))


class _Words:
    """The command line, cut into flags and the words that follow each."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.options: dict[str, list[str] | bool] = {}
        self.engine: dict[str, list[str]] = {}
        self.config_file: str | None = None
        self.problems: list[str] = []
        self.meant: set[str] = set()  # options that a misspelt flag probably meant

        known = {flag.text: flag for flag in flags().values()}
        negated = {f"--no-{flag.text[2:]}": flag for flag in flags().values() if flag.has_negation}
        # argparse only cuts here: it stops at its first complaint, so it is given nothing to complain about.
        parser = argparse.ArgumentParser(prog="vime train", allow_abbrev=False, add_help=False)
        engine_flags = {word.partition("=")[0] for word in argv if word.startswith(("--vllm-", "--vllm_"))}
        for text in sorted({*known, *negated, "--config", *engine_flags}):
            parser.add_argument(text, nargs="*", action=_Collect, default=argparse.SUPPRESS)
        namespace, strays = parser.parse_known_args(list(argv), argparse.Namespace(seen=[]))

        first: dict[str, list[str]] = {}
        for text, values in namespace.seen:
            negation = negated.get(text)
            target = negation.text if negation else text
            if text in engine_flags:  # in whatever spelling, and whether it is turned on or off
                target = "--vllm-" + text[len("--vllm-") :].replace("_", "-").removeprefix("no-")
            if target in first:
                self._repeated(text, values, target, first[target])
                continue
            first[target] = [text, *values]
            if text == "--config":
                self._config(values)
            elif text in engine_flags:
                self.engine[text[len("--vllm-") :].replace("_", "-")] = values
            elif negation:
                self.options[negation.name] = False
                if values:
                    self.problems.append(f"{text} is a switch and takes no value, but {' '.join(values)!r} follows it")
            else:
                self.options[known[text].name] = values
        self._strays(strays)

    def _config(self, values: list[str]) -> None:
        if len(values) == 1:
            self.config_file = values[0]
        else:
            self.problems.append("--config takes one YAML file")

    def _repeated(self, text: str, values: list[str], target: str, before: list[str]) -> None:
        again = [text, *values]
        if before == again:
            self.problems.append(f"{target} is given twice")
        else:
            earlier, later = (" ".join(masked_words(words, OF_ENGINES)) for words in (before, again))
            self.problems.append(f"{target} is given twice: '{earlier}' and '{later}'; keep one")

    def _strays(self, strays: list[str]) -> None:
        unknown_before = False
        for word in strays:
            if word.startswith("-") and word != "--":
                self._unknown(word.partition("=")[0])
                unknown_before = True
            elif not unknown_before:  # otherwise it is the value of the unknown flag
                self.problems.append(f"'{word}' stands where a flag was expected")

    def _unknown(self, word: str) -> None:
        texts = [*(flag.text for flag in flags().values()), "--config"]
        name = word.lstrip("-").replace("_", "-")
        hint = foreign.advice(name)
        exact = name.replace("-", "_")
        if exact in flags():
            hint = f"flags are written with two dashes and hyphens: {flags()[exact].text}"
            self.meant.add(exact)
        elif name.startswith("no-") and flags().get(exact.removeprefix("no_")):
            flag = flags()[exact.removeprefix("no_")]
            hint = f"leave {flag.text} out; where a --config file sets it, '{flag.text} false' takes it back"
            self.meant.add(flag.name)
        elif hint is None:
            near = closest("--" + name, texts, cutoff=0.75)
            hint = f"did you mean {near}?" if near else "`vime train --help` lists the flags"
            if near:
                self.meant.add(near[2:].replace("-", "_"))
        self.problems.append(f"unknown flag {word}: {hint}")
