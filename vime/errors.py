"""The errors that reach a person. Each message says what is wrong, with which value, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence


class VimeError(RuntimeError):
    """Base of every error that vime raises on purpose; the command line prints it without a traceback."""


class ConfigError(VimeError):
    """Flags, files or sizes that cannot work. Holds every problem found, not only the first."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"  - {problem}" for problem in self.problems))


class DataError(VimeError):
    """A prompt file, checkpoint directory or answer that does not hold what it should."""


class EngineError(VimeError):
    """A vLLM engine that refused, failed, died or did not answer within its deadline.

    Attributes:
        retryable: the same request may succeed later, or on another engine.
        unreachable: nobody listens at its address any more: it is dead or being replaced.
        status: HTTP status of its answer, where there was one.
    """

    def __init__(
        self, message: str, *, retryable: bool = False, unreachable: bool = False, status: int | None = None
    ) -> None:
        self.retryable, self.unreachable, self.status = retryable, unreachable, status
        super().__init__(message)


class TrainerError(VimeError):
    """A trainer rank that raised, died or did not answer within its deadline."""


class WeightSyncError(VimeError):
    """A weight update that did not happen as a whole. Names the phase, the engine or rank, and the cause.

    ``engines``: numbers of the engines that hold a mixture of weights (or are gone); empty where the trainer failed.
    """

    def __init__(self, phase: str, where: str, cause: str, engines: tuple[int, ...] = ()) -> None:
        self.phase, self.where, self.cause, self.engines = phase, where, cause, engines
        super().__init__(f"weight update failed in phase '{phase}' at {where}: {cause}")

    def __reduce__(self) -> tuple[type[WeightSyncError], tuple[str, str, str, tuple[int, ...]]]:
        # Ray carries it from a rank to the driver.
        return type(self), (self.phase, self.where, self.cause, self.engines)
