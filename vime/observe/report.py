"""``vime report RUN``: one HTML page about a run that needs neither a network nor a server.

The numbers are embedded as JSON and drawn as SVG by ``report.js``; text from prompts and answers reaches the page only
through ``textContent``, so that an answer cannot bring markup or scripts into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.errors import DataError
from vime.observe.journal import read_rows, write_aside
from vime.observe.summary import eval_names, phases, series, summary_table

MAX_SAMPLE_STEPS = 60  # steps whose samples are put into the page, evenly chosen, first and last among them
MAX_TEXT = 12_000  # characters of one prompt or answer; of longer ones the middle is left out
MAX_SAMPLE_CHARACTERS = 24_000_000  # of all samples together


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run's directory and return its path.

    A run that is still going, or that was killed, can be reported on as well.

    Raises:
        DataError: the directory holds no ``metrics.jsonl`` with at least one whole row.
    """
    run_dir = Path(run_dir)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if isinstance(row.get("step"), int)]
    if not rows:
        there = "is empty" if (run_dir / "metrics.jsonl").exists() else "does not exist"
        raise DataError(f"{run_dir / 'metrics.jsonl'} {there}: give the directory of a run that made at least one step")
    config = _read_json(run_dir / "config.json")
    data = {
        "name": "/".join(run_dir.resolve().parts[-2:]).removeprefix("runs/"),
        "tiles": tiles(rows),
        "steps": [row["step"] for row in rows],
        "metrics": _columns(rows),
        "evals": eval_names(rows),
        "phases": [phases(row) for row in rows],
        "table": summary_table(rows),
        "options": config,
        "samples": list(select_samples(run_dir / "samples.jsonl")),
    }
    here = Path(__file__).parent
    page = (here / "report.html").read_text(encoding="utf-8")
    page = page.replace("/*STYLE*/", (here / "report.css").read_text(encoding="utf-8"))
    page = page.replace("/*SCRIPT*/", (here / "report.js").read_text(encoding="utf-8"))
    page = page.replace("/*DATA*/", script_json(data))  # last: what it holds is never searched for marks
    path = run_dir / "report.html"
    write_aside(path, page.encode("utf-8", errors="replace"))  # a lone surrogate in an answer is no reason to fail
    return path


def script_json(value: Any) -> str:
    """JSON that may stand inside a ``<script>`` element whatever strings it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def tiles(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The few numbers at the top of the page."""
    made: list[dict[str, str]] = []
    for name in eval_names(rows):
        points = series(rows, f"eval/{name}/reward_mean")
        before, after = points[0][1], points[-1][1]
        text = f"{before:.3f} → {after:.3f}" if len(points) > 1 else f"{before:.3f}"
        made.append({"label": f"evaluation: {name}", "value": text, "note": f"{after - before:+.3f}"})
    rewards = series(rows, "rollout/reward_mean")
    if rewards:
        best = max(rewards, key=lambda point: point[1])
        made.append(
            {
                "label": "mean reward of a rollout",
                "value": f"{rewards[0][1]:.3f} → {rewards[-1][1]:.3f}",
                "note": f"best {best[1]:.3f} at step {best[0]}",
            }
        )
    differences = series(rows, "train/logprob_abs_diff")
    if differences:
        worst = max(differences, key=lambda point: point[1])
        made.append(
            {
                "label": "mean |log-prob difference|, engine to trainer",
                "value": f"{differences[-1][1]:.1e}",
                "note": f"worst step {worst[1]:.1e}",
            }
        )
    trained = [row for row in rows if "train/loss" in row or "rollout/reward_mean" in row]
    seconds = [sum(phases(row).values()) for row in trained]
    total = sum(sum(phases(row).values()) for row in rows)
    if total:
        middle = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
        made.append(
            {"label": "steps", "value": str(len(trained)), "note": f"{middle:.2f} s (median), {total:.0f} s all"}
        )
    return made


def select_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Samples for the page, in the order of the file: of evenly chosen steps, within the page's size."""
    steps = sorted({row["step"] for row in _stream(path)})
    if len(steps) > MAX_SAMPLE_STEPS:
        last = len(steps) - 1
        steps = [steps[round(i * last / (MAX_SAMPLE_STEPS - 1))] for i in range(MAX_SAMPLE_STEPS)]
    chosen = set(steps)
    share = MAX_SAMPLE_CHARACTERS // max(len(chosen), 1)  # each step gets its own, so that the last ones are not lost
    used: dict[int, int] = {}
    for row in _stream(path):
        if row["step"] not in chosen:
            continue
        row["prompt"] = shorten(_prompt_text(row.get("prompt")))
        row["response"] = shorten(str(row.get("response", "")))
        size = len(row["prompt"]) + len(row["response"]) + 200
        used[row["step"]] = used.get(row["step"], 0) + size
        if used[row["step"]] <= share:
            yield row


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in prompt if isinstance(m, dict))
    return str(prompt)


def _stream(path: Path) -> Iterator[dict[str, Any]]:
    """Rows one after the other; a long run's samples need not fit into memory at once."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return  # torn by a crash
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    names = {key: None for row in rows for key, value in row.items() if key != "step" and _is_number(value)}
    return {name: [row[name] if _is_number(row.get(name)) else None for row in rows] for name in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # an interesting run may come without it; the page then has no options
