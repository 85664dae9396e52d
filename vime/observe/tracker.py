"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard, Weights & Biases, the timeline, samples and the table.

A run directory holds::

    config.json      every option
    metrics.jsonl    one JSON object per step
    samples.jsonl    prompts, answers and rewards, one JSON object per answer
    trace.json       timeline of the phases (open in https://ui.perfetto.dev)
    tensorboard/     events, with --use-tensorboard and without TENSORBOARD_DIR
    wandb-id         the run's id at W&B, with --use-wandb
    report.html      written by ``vime report RUN``
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import ConfigError
from vime.masking import OF_ENGINES, masked_options, masked_words
from vime.observe import progress
from vime.observe.journal import Journal, read_rows, write_aside
from vime.observe.progress import Progress
from vime.observe.summary import headline, summary_table
from vime.observe.trace import Trace

if TYPE_CHECKING:
    from vime.config import Config
    from vime.types import Sample

log = logging.getLogger(__name__)

_WANDB_ID = "wandb-id"
_FILES = ("metrics.jsonl", "samples.jsonl", "trace.json", "config.json", "report.html", _WANDB_ID)

# The phases around the current one; per task, so that concurrent asyncio tasks do not see each other's.
_path: ContextVar[tuple[str, ...]] = ContextVar("vime_phase", default=())


def new_run_dir(parent: str | Path = "runs") -> Path:
    """A fresh ``runs/<date>-<time>`` that did not exist before."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        path = Path(parent) / (name if attempt == 0 else f"{name}-{attempt + 1}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{parent}/{name} and a hundred more exist")


class Tracker:
    """The driver's record of a run. One per run, used from the driver process alone.

    Args:
        config: the run's options; ``config.observe`` decides what is written beside the files.
        run_dir: where; default ``--run-dir``, else a new ``runs/<date>-<time>``.
        next_step: the first step that will be logged. When a run continues from a checkpoint, what the earlier process
            logged for this step and later is dropped, so that the files equal those of an uninterrupted run. With 0, an
            earlier run's files in ``run_dir`` are kept under new names (``metrics.jsonl.1``).

    Raises:
        ConfigError: ``--use-wandb`` without the package, or a ``run_dir`` that cannot be written.
    """

    def __init__(self, config: Config, run_dir: str | Path | None = None, next_step: int = 0) -> None:
        options = config.observe
        run_dir = run_dir or options.run_dir
        try:
            self.run_dir = Path(run_dir) if run_dir else new_run_dir()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if next_step == 0:
                _keep_earlier(self.run_dir)
            self._metrics = Journal(self.run_dir / "metrics.jsonl", next_step)
            self._samples = Journal(self.run_dir / "samples.jsonl", next_step)
            self.trace = Trace(self.run_dir / "trace.json")
            write_aside(self.run_dir / "config.json", json.dumps(describe(config), indent=2).encode())
        except OSError as error:
            raise ConfigError([f"--run-dir {run_dir or 'runs'}: cannot be written ({error.strerror})"]) from error
        self._config = config
        self._step = next_step
        self._times: dict[str, float] = {}
        self._warned: set[str] = set()
        self._closed = False
        progress.set_enabled(not options.no_progress)
        self._board = _open_tensorboard(self.run_dir, next_step) if options.use_tensorboard else None
        self._wandb = _open_wandb(config, self.run_dir) if options.use_wandb else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics of a step; they are on the disk when this returns.

        May be called several times for the same step (evaluation first, training after): the entries are merged into
        one row. The seconds of the phases that ended since the last call go into it as ``time/<name>``; a phase that
        ran twice in a step counts with its sum. ``step`` may not go back.
        """
        last = self._metrics.last
        if last is not None and step < last["step"]:
            raise ValueError(f"step {step} comes after step {last['step']}")
        row = {name: self._plain(step, name, value) for name, value in metrics.items()}
        same = last is not None and step == last["step"]
        for name, seconds in self._times.items():
            row[name] = round(seconds + (last.get(name, 0.0) if same and last else 0.0), 6)
        self._times = {}
        if same:
            self._metrics.extend_last(row)
        else:
            self._metrics.append({"step": step, **row})
        self._step = step
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            # Not as wandb's own step: what a continued run says again of a step it has had would be thrown away.
            self._wandb.log({"step": step, **numbers})
        line = headline(step, self._config.rollout.num_rollout, {**row, **metrics})
        if line and not self._config.observe.no_progress:
            progress.write(line)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Progress]:
        """Time a part of a step and show it as the live line.

        The seconds become ``time/<name>`` of the next row logged; a phase inside another one becomes
        ``time/<outer>/<name>``, so that the entries with one slash add up to the step. Yields the :class:`Progress`.
        """
        outer = _path.get()
        token = _path.set((*outer, name))
        label = name if outer else self._label(name)
        start, clock = time.time(), time.perf_counter()
        try:
            with Progress(label, total, unit) as line:
                yield line
        finally:
            seconds = time.perf_counter() - clock
            _path.reset(token)
            key = "time/" + "/".join((*outer, name))
            self._times[key] = self._times.get(key, 0.0) + seconds
            self.trace.span(name, start, start + seconds)

    def samples(self, step: int, samples: Sequence[Sample], source: str = "train") -> None:
        """Keep the first ``--save-samples`` prompts of a step with all their answers, for the report.

        ``source`` says which prompts they answer: ``train``, or ``eval/<name>``.
        """
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        kept = list(groups.values())[: self._config.observe.save_samples]
        self._samples.append(*(_sample_row(step, source, sample) for group in kept for sample in group))

    def table(self) -> str:
        """The run in a few lines: rewards first, last and best, evaluation before and after, seconds per phase."""
        return summary_table(read_rows(self._metrics.path))

    def close(self) -> None:
        """End all files; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._times and self._metrics.last is not None:  # phases after the last row, such as the last checkpoint
            self.log(self._metrics.last["step"], {})
        self._metrics.close()
        self._samples.close()
        self.trace.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _label(self, name: str) -> str:
        last = self._metrics.last
        step = self._step if last is None else last["step"] + 1
        total = self._config.rollout.num_rollout
        return f"step {step} · {name}" if total is None else f"step {step}/{total} · {name}"

    def _plain(self, step: int, name: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        number = float(value)  # also a numpy or torch scalar
        if math.isfinite(number):
            return number
        if name not in self._warned:  # JSON has no word for it; the reader of the file finds null
            self._warned.add(name)
            log.warning("step %d: %s is %s (null in metrics.jsonl; said once)", step, name, number)
        return None


def describe(config: Any) -> dict[str, Any]:
    """Options as plain data, without credentials in addresses, and without secrets passed on to the engine (others have
    names such as ``reward_key`` and hold none)."""
    options = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)  # type: ignore[arg-type]
    options = json.loads(json.dumps(options, default=str))
    shown = masked_options(options, by_name=False)
    if "rollout" in options:
        shown["rollout"]["vllm"] = masked_options(options["rollout"].get("vllm", {}))
    return shown


def _keep_earlier(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:
        return
    number = 1
    while any((run_dir / f"{name}.{number}").exists() for name in _FILES):
        number += 1
    for name in _FILES:
        if (run_dir / name).exists():
            (run_dir / name).rename(run_dir / f"{name}.{number}")
    log.warning("%s holds an earlier run; its files are now metrics.jsonl.%d and so on", run_dir, number)


def _sample_row(step: int, source: str, sample: Sample) -> dict[str, Any]:
    return {
        "step": step,
        "source": source,
        "group": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "label": _jsonable(sample.label),
        "response": sample.response,
        "response_length": len(sample.response_tokens),
        "status": str(sample.status),
        "reward": sample.reward if sample.reward is None or math.isfinite(sample.reward) else str(sample.reward),
        "reward_info": _jsonable(sample.reward_info),
        "weight_versions": sample.weight_versions,
    }


def _jsonable(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _open_tensorboard(run_dir: Path, next_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    folder = os.environ.get("TENSORBOARD_DIR") or str(run_dir / "tensorboard")
    # purge_step hides what an interrupted process wrote for the steps that are now made again
    return SummaryWriter(folder, purge_step=next_step or None)


def _open_wandb(config: Config, run_dir: Path) -> Any:
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(["--use-wandb: package wandb is not installed (pip install wandb)"]) from error
    words = sys.argv[1:]  # wandb keeps them among what it finds out about the machine
    secret = masked_words(words, OF_ENGINES) != words
    run = wandb.init(
        project=config.observe.wandb_project,
        name=run_dir.name,
        id=_wandb_id(run_dir),  # a continued run goes on in the same place
        resume="allow",
        dir=str(run_dir),
        config=describe(config),
        settings=wandb.Settings(x_disable_meta=True) if secret else None,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _wandb_id(run_dir: Path) -> str:
    """The run's name at W&B, kept in its directory: directories of the same name are other runs."""
    file = run_dir / _WANDB_ID
    if not file.exists():
        write_aside(file, uuid.uuid4().hex.encode())
    return file.read_text().strip()
