"""Help by topic: seventy flags at once help nobody."""

from __future__ import annotations

import shutil
import textwrap

from vime.config.flags import Flag, flags, topics


def list_topics(command: str) -> str:
    """The topics with how many flags each has, the required flags, and how to see one topic."""
    lines = [
        f"usage: vime {command} [--config FILE.yaml] FLAGS",
        "",
        "required:",
        *(_line(flag) for flag in flags().values() if flag.required),
        "  --prompt-data PATH, --num-rollout N (or --num-epoch N), --rm-type (or --custom-rm-path)",
        "",
        "topics:",
    ]
    for topic, owner in topics().items():
        count = sum(flag.topic == topic for flag in flags().values())
        lines.append(f"  {topic:<12} {_title(owner)} ({count} flags)")
    lines += [
        "",
        f"  vime {command} --help-topic TOPIC   the flags of one topic",
        f"  vime {command} --help-all           every flag",
        "",
        "--config FILE.yaml holds the same names, flat or grouped by topic; the command line wins.",
        "--vllm-X [VALUE] goes to vLLM's server as --X [VALUE].",
    ]
    return "\n".join(lines)


def one_topic(topic: str) -> str:
    owner = topics()[topic]
    return "\n".join([f"{topic}: {_title(owner)}", *(_line(flag) for flag in flags().values() if flag.topic == topic)])


def everything() -> str:
    return "\n\n".join(one_topic(topic) for topic in topics())


def _title(owner: type) -> str:
    return (owner.__doc__ or owner.__name__).strip().splitlines()[0]


def _line(flag: Flag) -> str:
    name = f"--[no-]{flag.text[2:]}" if flag.has_negation else flag.text
    head = f"  {name} {flag.placeholder}".rstrip()
    text = flag.help
    if flag.required:
        text += " (required)"
    elif flag.default not in (None, False, [], {}) and "default" not in text:
        text += f" (default: {flag.default})"
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    indent = " " * 6
    return head + "\n" + textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
