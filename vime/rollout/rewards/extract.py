"""Where the final answer stands in a response."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` (or ``\fbox{...}``, or ``\boxed 5``) holds; None without a closed one."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    if text[start : start + 1] != "{":
        word = re.match(r"[^\s$\\,;]+", text[start:])
        return word[0].rstrip(".") if word else None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{" and text[position - 1] != "\\":
            depth += 1
        elif text[position] == "}" and text[position - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip()
    return None


def answer_line(text: str) -> str | None:
    """What follows the last ``Answer:`` on its line, without Markdown's asterisks; None if there is no such line."""
    found = None
    for match in _ANSWER.finditer(text):
        found = match[1]
    return found.strip().strip("*").strip() if found else None
