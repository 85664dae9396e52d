"""``vime train | check | convert | report``. What a person did wrong is printed as one message, without a traceback."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vime.cluster.process import Terminated
from vime.config import Config
from vime.config import help as help_text
from vime.config.check import Findings, examine
from vime.config.check_files import hf_directory, is_torch_dist, read_spec
from vime.config.flags import closest, did_you_mean, topics
from vime.config.parse import parse_all
from vime.config.summary import summary
from vime.errors import ConfigError, DataError, VimeError
from vime.masking import masked
from vime.observe.progress import LogHandler

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
LONGEST = 1500  # letters of one problem

# what the machine lacks or forbids; no stack would say more
_SYSTEM_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}
_SYSTEM_REFUSES |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM}

USAGE = """usage: vime COMMAND ...

  vime train FLAGS     train a model (python train.py FLAGS is the same)
  vime check FLAGS     say what is wrong with these flags, or what they would run; starts nothing
  vime convert         a Hugging Face directory <-> a Megatron torch_dist checkpoint
  vime report RUN      one HTML page about a run's directory

`vime COMMAND --help` says more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0; 1 failed; 2 bad input; 130 interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "check": _check,
        "convert": _convert,
        "report": _report,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        import vime

        print(vime.__version__)
        return 0
    command = commands.get(words[0])
    if command is None:
        _complain([f"unknown command '{words[0]}'{did_you_mean(words[0], list(commands), prefix='vime ')}"])
        print(USAGE, file=sys.stderr)
        return BAD_INPUT
    try:
        code = command(words[1:])
        sys.stdout.flush()
        return code
    except ConfigError as error:
        _complain(error.problems)
        return BAD_INPUT
    except DataError as error:
        _complain([str(error)])
        return BAD_INPUT
    except VimeError as error:
        print(f"vime: {masked(str(error))}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # `vime train --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _SYSTEM_REFUSES:
            raise  # ours: the stack says where
        place = f"{error.filename}: " if error.filename else ""
        print(f"vime: {place}{error.strerror}", file=sys.stderr)
        return FAILED
    except Terminated as end:
        print(f"vime: {end}", file=sys.stderr)
        return 128 + end.signum
    except KeyboardInterrupt:
        print("vime: interrupted", file=sys.stderr)
        return INTERRUPTED


def _complain(problems: Sequence[str]) -> None:
    noun = "problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"vime: {noun}:", file=sys.stderr)
    for problem in map(masked, problems):
        if len(problem) > LONGEST:  # a value of thousands of letters is quoted in it
            problem = f"{problem[: LONGEST - 300]} ... {problem[-300:]}"
        print("  - " + problem.replace("\n", "\n    "), file=sys.stderr)


def _help(command: str, words: list[str]) -> int | None:
    """Print the help asked for; None when none was."""
    if "--help-all" in words:
        print(help_text.everything())
    elif "--help-topic" in words:
        chosen = words[words.index("--help-topic") + 1 :][:1]
        if not chosen or chosen[0] not in topics():
            near = closest(chosen[0], list(topics())) if chosen else None
            hint = f"; did you mean {near}?" if near else ""
            _complain([f"--help-topic takes one of {', '.join(topics())}{hint}"])
            return BAD_INPUT
        print(help_text.one_topic(chosen[0]))
    elif "--help" in words or "-h" in words:
        print(help_text.list_topics(command))
    else:
        return None
    return 0


def _train(words: list[str]) -> int:
    shown = _help("train", words)
    if shown is not None:
        return shown
    config, found = _checked(words)
    print(summary(config, found), flush=True)
    from vime.cluster.process import start_of_process

    start_of_process(config.cluster.existing_ray)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LogHandler()])
    from vime.controller import train  # imports Ray, which reads the environment that was set just now

    train(config)
    return 0


def _check(words: list[str]) -> int:
    shown = _help("check", words)
    if shown is not None:
        return shown
    config, found = _checked(words)
    print(f"vime: nothing is wrong; `vime train` with these flags would run\n{summary(config, found)}")
    return 0


def _checked(words: list[str]) -> tuple[Config, Findings]:
    """Options that may run. Raises ConfigError with all that is wrong, of the flags as of what they name."""
    here = os.getcwd()
    if here not in sys.path:  # where people keep the functions that they name on the command line
        sys.path.append(here)
    parsed = parse_all(words)
    found = examine(parsed.config)
    problems = parsed.problems + parsed.believable(found.problems)
    if problems:
        raise ConfigError(problems)
    return parsed.config, found


def _convert(words: list[str]) -> int:
    parser = _Parser(
        prog="vime convert",
        description="Hugging Face directory -> Megatron torch_dist checkpoint, or back; which way follows from SOURCE.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", type=_path, help="a Hugging Face directory, or a torch_dist checkpoint"
    )
    parser.add_argument("target", metavar="TARGET", type=_path, help="a directory that does not exist yet")
    parser.add_argument(
        "--hf-checkpoint",
        metavar="PATH",
        type=_path,
        help="from torch_dist: Hugging Face directory with the config and tokenizer",
    )
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="default: the checkpoint's")
    chosen = parser.parse_args(words)
    source, target, hf = chosen.source, chosen.target, chosen.hf_checkpoint
    problems = []
    from_hf = os.path.isfile(os.path.join(source, "config.json"))
    if not os.path.isdir(source):
        problems.append(f"SOURCE {source}: no such directory")
    elif from_hf:
        problems += [*_readable("SOURCE", source)]
        if hf is not None:
            problems.append(f"--hf-checkpoint {hf} means nothing: SOURCE {source} is a Hugging Face directory itself")
    elif not is_torch_dist(source):
        problems.append(
            f"SOURCE {source}: neither a Hugging Face directory (no config.json) nor a Megatron torch_dist checkpoint"
        )
    elif hf is None:
        problems.append(
            "--hf-checkpoint is missing: a Hugging Face directory of the same model, for config and tokenizer"
        )
    else:
        problems += _readable("--hf-checkpoint", hf)
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        problems.append(f"TARGET {target} exists already; choose another name or remove it")
    if problems:
        raise ConfigError(problems)
    # that apex is not here, and what is deprecated between torch and Megatron
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed|vime\.")
    from vime.backends.megatron_utils.convert import hf_to_torch_dist, torch_dist_to_hf

    if from_hf:
        print(hf_to_torch_dist(source, target, chosen.dtype))
    else:
        print(torch_dist_to_hf(source, target, str(hf), chosen.dtype))
    return 0


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return text


def _readable(flag: str, path: str) -> list[str]:
    try:
        read_spec(flag, path)
    except DataError as error:
        return [str(error)]
    return hf_directory(flag, path, tokenizer=False) if flag == "SOURCE" else []


class _Parser(argparse.ArgumentParser):
    """argparse for the small commands, with errors in the same words as the large ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (`{self.prog} --help`)"])


def _report(words: list[str]) -> int:
    parser = _Parser(prog="vime report", description="Write one HTML page about a run.")
    parser.add_argument(
        "run_dir", metavar="RUN", type=_path, help="the run's directory (--run-dir, by default runs/<date>-<time>)"
    )
    chosen = parser.parse_args(words)
    from vime.observe.report import write_report

    print(write_report(chosen.run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
