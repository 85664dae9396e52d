"""Functions of the user's own, named on the command line as ``module.function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vime.errors import ConfigError


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The function at ``package.module.function``.

    Raises:
        ConfigError: no such module or function, or the module fails to import; names ``flag``.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError([f"{flag} {path}: must be module.function"])
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError([f"{flag} {path}: importing {module} failed: {type(error).__name__}: {error}"]) from error
    if not callable(function):
        raise ConfigError([f"{flag} {path}: module {module} has no function '{name}'"])
    return function
