"""Files and directories: there, whole, and what the run takes them for."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.backends.megatron_utils.checkpoint_directory import LATEST, CheckpointDirectory, torch_dist_checkpoint
from vime.config import Config
from vime.config.flags import did_you_mean, flags, value_of
from vime.errors import DataError
from vime.models.hf_config import read_json
from vime.models.layout import checkpoint_tensors
from vime.models.spec import ModelSpec, spec_from_hf

RUNS = "runs"  # below it, where --run-dir is left out
ROLLOUT_STATE = "rollout.json"  # what vime.run adds to a trainer's checkpoint
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_files(config: Config, spec: ModelSpec | None) -> list[str]:
    """Problems of everything that is read or written; prompt files are in check_data."""
    problems = list(_reference(config, spec))
    problems += _functions(config)
    problems += [*_load(config), *_save(config)]
    if config.checkpoint.hf_checkpoint and spec is not None:
        problems += hf_directory("--hf-checkpoint", config.checkpoint.hf_checkpoint, tokenizer=True, spec=spec)
    if config.data.apply_chat_template and spec is not None:
        problems += _chat_template(config.checkpoint.hf_checkpoint)
    return problems


def read_spec(flag: str, path: str) -> ModelSpec:
    """The shape of the model in a Hugging Face directory. Raises DataError with a sentence that names the flag."""
    folder = Path(path)
    if not folder.exists():
        hint = ""
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            name = path.split("/")[1]
            hint = (
                "; vime reads local directories: if this is a model's name at Hugging Face, "
                f"`hf download {path} --local-dir {name}`, then {flag} {name}"
            )
        raise DataError(f"{flag} {path}: no such directory{hint}")
    if not (folder / "config.json").is_file():
        what = "a Megatron checkpoint" if is_torch_dist(path) else "no Hugging Face model"
        raise DataError(f"{flag} {path}: no config.json in it; this is {what}")
    try:
        return spec_from_hf(path)
    except DataError as error:
        raise DataError(f"{flag} {path}: {error}") from error


def hf_directory(flag: str, path: str, *, tokenizer: bool, spec: ModelSpec | None = None) -> list[str]:
    """Problems of a directory that has a config.json: tokenizer and weights must be there, whole, and ``spec``'s."""
    folder = Path(path)
    problems = [f"{flag} {path}: {what}" for what in _tokenizer(folder, spec)] if tokenizer else []
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        shards = ["model.safetensors"]
    elif index.is_file():
        try:
            shards = sorted(set(read_json(index)["weight_map"].values()))
            if not shards or not all(isinstance(name, str) for name in shards):
                raise ValueError("weight_map must name a file for every tensor")
        except DataError as error:
            return [*problems, f"{flag} {path}: {error}"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return [*problems, f"{flag} {path}: {index.name} cannot be read ({type(error).__name__}: {error})"]
    else:
        other = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" ({other[0]} is a pickle; save it as safetensors)" if other else ""
        return [*problems, f"{flag} {path}: no weights in it (model.safetensors or {index.name}){hint}"]
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        problems.append(f"{flag} {path}: {len(missing)} of {len(shards)} weight files are missing, first {missing[0]}")
    held: dict[str, Any] = {}  # tensor -> its shape
    broken = [(name, why) for name in shards if name not in missing and (why := _safetensors(folder / name, held))]
    if broken:
        problems.append(f"{flag} {path}: {broken[0][0]} {broken[0][1]}" + _more(len(broken)))
    if not missing and not broken and spec is not None:
        problems += [f"{flag} {path}: {what}" for what in _other_weights(held, spec)]
    return problems


def _tokenizer(folder: Path, spec: ModelSpec | None) -> Iterator[str]:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield f"no tokenizer in it ({', '.join(_TOKENIZERS)})"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            held = read_json(folder / name)
        except DataError as error:
            yield str(error)
            continue
        model = held.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict | list) and spec is not None and len(vocabulary) > spec.vocab_size:
            yield f"{name} has {len(vocabulary)} tokens, but config.json says vocab_size {spec.vocab_size}"


def _other_weights(held: dict[str, Any], spec: ModelSpec) -> Iterator[str]:
    """Where the weight files hold another model than config.json describes."""
    needed = checkpoint_tensors(spec)
    absent = [name for name in needed if name not in held]
    other = [name for name, shape in needed.items() if name in held and held[name] != list(shape)]
    layers = re.compile(r"model\.layers\.(\d+)\.")
    deepest = max((int(match[1]) + 1 for match in map(layers.match, held) if match), default=0)
    if absent:
        yield f"the weights have no tensor {absent[0]}, which its config.json asks for" + _more(len(absent), "tensors")
    if other:
        yield (
            f"the weights' {other[0]} has shape {held[other[0]]}, but its config.json asks for "
            f"{list(needed[other[0]])}{_more(len(other), 'tensors')}"
        )
    if deepest > spec.num_layers:
        yield f"the weights have {deepest} layers, but its config.json says num_hidden_layers {spec.num_layers}"


def _safetensors(file: Path, held: dict[str, Any]) -> str | None:
    """What is wrong with a weight file, judged by its header and its length. Adds its tensors' shapes to ``held``."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            return "is a git-lfs pointer, not the file itself (`git lfs pull`)"
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            return f"is cut off: {size} bytes, less than its header says"
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            held.update({name: entry["shape"] for name, entry in header.items()})
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return "is not a safetensors file"
    expected = 8 + length + end
    return None if size == expected else f"has {size} bytes instead of {expected}: download it again"


def is_torch_dist(path: str) -> bool:
    """Whether ``path`` is a Megatron torch_dist checkpoint or a folder of them."""
    return torch_dist_checkpoint(path) is not None


def _reference(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    path = config.checkpoint.ref_load
    if path is None:
        return
    folder = Path(path)
    if not folder.exists():
        yield f"--ref-load {path}: no such directory"
        return
    if is_torch_dist(path):
        return
    if not (folder / "config.json").is_file():
        yield (
            f"--ref-load {path}: neither a Hugging Face directory (no config.json) nor a Megatron torch_dist "
            f"checkpoint (no metadata.json, no {LATEST})"
        )
        return
    try:
        other = read_spec("--ref-load", path)
    except DataError as error:
        yield str(error)
        return
    yield from hf_directory("--ref-load", path, tokenizer=False, spec=other)
    if spec is not None:
        shape = ("num_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_query_groups", "num_experts")
        for name in shape:
            ours, theirs = getattr(spec, name), getattr(other, name)
            if ours != theirs:
                yield (
                    f"--ref-load {path} has {name} {theirs}, but --hf-checkpoint {config.checkpoint.hf_checkpoint} has "
                    f"{ours}; the reference must have the policy's shape"
                )
                return


def _load(config: Config) -> Iterator[str]:
    path = config.checkpoint.load
    if path is None:
        return
    folder = Path(path)
    if not folder.exists():
        save = config.checkpoint.save
        if save is None or Path(save).resolve() != folder.resolve():
            yield (
                f"--load {path}: no such directory. Only the one that --save names too may be missing: "
                "it will hold what the next start continues from"
            )
        return  # a fresh start, and the summary says so
    if not folder.is_dir():
        yield f"--load {path}: not a directory"
    elif (folder / "config.json").is_file():
        yield (
            f"--load {path}: a Hugging Face directory. --load continues a run from what --save wrote; "
            "the weights to start from are --hf-checkpoint's"
        )
    elif (newest := CheckpointDirectory(path).newest()) and not (newest[1] / ROLLOUT_STATE).is_file():
        yield (
            f"--load {path}: {newest[1].name} holds weights only (no {ROLLOUT_STATE}), not the state of a run; "
            "give it as --ref-load, or make a Hugging Face directory of it by `vime convert` for --hf-checkpoint"
        )
    elif checkpoint_step(path) is None and any(_foreign(folder)):
        yield f"--load {path}: no checkpoint in it, but {next(_foreign(folder))} (an empty one: fresh start)"


def checkpoint_step(path: str) -> int | None:
    """Rollouts that the newest checkpoint below ``path`` has seen; None where there is none."""
    newest = CheckpointDirectory(path).newest()
    return newest[0] if newest else None


def _foreign(folder: Path) -> Iterator[str]:
    """What is in a directory beside remains of an interrupted save."""
    return (entry.name for entry in sorted(folder.iterdir()) if not entry.name.startswith(("iter_", ".", LATEST)))


def _save(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    for flag, path in (
        ("--save", checkpoint.save),
        ("--save-hf", checkpoint.save_hf),
        ("--run-dir", config.observe.run_dir or RUNS),
        ("--update-weight-disk-dir", config.weight_sync.update_weight_disk_dir),
    ):
        if path is None:
            continue
        try:
            parent = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
        except OSError as error:  # longer than the system takes
            yield f"{flag} {path}: {error.strerror}"
            continue
        if not parent.is_dir():
            yield f"{flag} {path}: {parent} is not a directory"
        elif not os.access(parent, os.W_OK):
            yield f"{flag} {path}: no permission to write in {parent}"
    if checkpoint.save_hf and os.path.exists(checkpoint.save_hf):
        for flag, path in (("--hf-checkpoint", checkpoint.hf_checkpoint), ("--ref-load", checkpoint.ref_load)):
            if path and os.path.exists(path) and os.path.samefile(path, checkpoint.save_hf):
                yield f"--save-hf {checkpoint.save_hf} would overwrite {flag}; choose another directory"
    if checkpoint.save and os.path.isdir(checkpoint.save):
        have = checkpoint_step(checkpoint.save)
        start = checkpoint_step(checkpoint.load) if checkpoint.load and os.path.isdir(checkpoint.load) else None
        if have is not None and (start or 0) < have:
            yield (
                f"--save {checkpoint.save} holds the checkpoint of another run after {have} rollouts, and this run "
                f"starts at {start or 0}; continue it by --load {checkpoint.save}, or choose another directory"
            )


def _chat_template(path: str) -> Iterator[str]:
    folder, found = Path(path), []
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        with contextlib.suppress(OSError, ValueError, DataError):  # what is wrong with them is said elsewhere
            file = folder / name
            text = file.read_text(encoding="utf-8") if name.endswith("jinja") else read_json(file).get("chat_template")
            if text:
                found.append((name, text))
    if not found:
        yield (
            f"--apply-chat-template: {path} has no chat template (chat_template in "
            "tokenizer_config.json, or chat_template.jinja); leave the flag out for a base model"
        )
    elif isinstance(text := found[0][1], str):  # a list: several templates by name
        import jinja2

        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except jinja2.TemplateSyntaxError as error:
            # {% generation %}, which marks the assistant's words, is an extension of transformers'
            if "generation" not in text:
                where = f"{folder / found[0][0]}:{error.lineno}"
                yield f"--apply-chat-template: {where} is no Jinja template ({error.message})"


def _more(count: int, what: str = "files") -> str:
    return f" (and {count - 1} more {what})" if count > 1 else ""


def _functions(config: Config) -> Iterator[str]:
    for name, flag in flags().items():
        value = value_of(config, name)
        if flag.metadata["kind"] == "function" and value is not None:
            problem = function_problem(value)
            if problem:
                yield f"{flag.text} {value}: {problem}"


def function_problem(path: str) -> str | None:
    """Why ``module.function`` cannot be what it says, judged without running any of the module's code."""
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        return "must be module.function, as in my_package.rewards.score"
    first, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError) as error:
        return f"module {first} cannot be looked up ({error})"
    if found is None:
        return f"no module '{first}' in the working directory or on PYTHONPATH"
    file = Path(found.origin) if found.origin and not rest else None
    for folder in map(Path, found.submodule_search_locations or ()) if rest else ():
        inner = folder.joinpath(*rest)
        file = next((file for file in (inner.with_suffix(".py"), inner / "__init__.py") if file.is_file()), file)
    if file is None:
        return f"no module '{module}' (no {'/'.join(rest)}.py in {first})"
    if file.suffix != ".py":
        return None  # compiled: only importing would tell
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError) as error:
        return f"{file} is not valid Python ({error})"
    except SyntaxError as error:
        return f"{file}:{error.lineno} is not valid Python ({error.msg})"
    names = set(_defined(body))
    if name in names or "*" in names or "__getattr__" in names:
        return None
    return f"{file} defines no '{name}'{did_you_mean(name, sorted(names))}"


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined([*node.body, *node.orelse])
