"""Everything about a run that can be refused before a GPU, Ray, torch or vLLM is touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vime.config import Config
from vime.config.check_data import Rows, check_data
from vime.config.check_files import check_files, read_spec
from vime.config.check_meaning import check_meaning
from vime.config.check_memory import Estimate, check_memory, estimate
from vime.config.check_model import check_model
from vime.config.check_sizes import check_sizes
from vime.config.machine import Machine, look
from vime.errors import ConfigError, DataError
from vime.models.spec import ModelSpec


@dataclass
class Findings:
    """What is wrong with a run, and what was learned about it on the way."""

    problems: list[str] = field(default_factory=list)
    spec: ModelSpec | None = None
    machine: Machine | None = None
    memory: Estimate | None = None
    rows: dict[str, Rows] = field(default_factory=dict)  # by prompt file


def check(config: Config, machine: Machine | None = None) -> list[str]:
    """Every problem of the run, each a sentence with the values at fault; empty when it may start."""
    return examine(config, machine).problems


def examine(config: Config, machine: Machine | None = None) -> Findings:
    """Like :func:`check`, and hands back what the run would be. ``machine``: instead of the one it runs on."""
    found = Findings(machine=machine)
    problems = _Problems()
    if machine is None:
        try:
            found.machine = look(config)
        except ConfigError as error:
            problems += error.problems
    try:
        found.spec = read_spec("--hf-checkpoint", config.checkpoint.hf_checkpoint)
    except DataError as error:
        problems.append(str(error))
    except OSError as error:
        problems.unreadable(error)
    problems += check_meaning(config)
    sizes = check_sizes(config, found.spec, found.machine)
    problems += sizes
    if found.spec is not None:
        problems += check_model(config, found.spec)
    try:
        problems += check_files(config, found.spec)
    except OSError as error:
        problems.unreadable(error)
    data_problems, found.rows = check_data(config)
    problems += data_problems
    if found.spec is not None and found.machine is not None and not sizes:  # memory follows from a valid layout
        found.memory = estimate(config, found.spec, found.machine.device)
        problems += check_memory(config, found.spec, found.machine)
    found.problems = list(_distinct(problems))
    return found


class _Problems(list[str]):
    def unreadable(self, error: OSError) -> None:
        """A path that the system itself refuses: too long, no permission on the way to it, a disk that fails."""
        self.append(f"{error.filename}: {error.strerror}")


def _distinct(problems: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(problems)
