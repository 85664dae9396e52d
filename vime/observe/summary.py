"""A run in words: the line of one step, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.observe.progress import duration

Row = Mapping[str, Any]

# What the line of a step shows, in this order, where it is there.
_HEADLINE = (
    ("rollout/reward_mean", "reward {:.3f}"),
    ("rollout/response_length_mean", "length {:.1f}"),
    ("rollout/truncated_fraction", "truncated {:.0%}"),
    ("train/loss", "loss {:.4f}"),
    ("train/kl", "kl {:.4f}"),
    ("train/entropy", "entropy {:.3f}"),
    ("train/grad_norm", "grad {:.3f}"),
    ("train/logprob_abs_diff", "|Δlogp| {:.1e}"),
)


def phases(row: Row) -> dict[str, float]:
    """Seconds of the outermost phases of a step."""
    return {
        name.removeprefix("time/"): float(value)
        for name, value in row.items()
        if name.startswith("time/") and name.count("/") == 1 and isinstance(value, int | float)
    }


def eval_names(rows: Sequence[Row]) -> list[str]:
    """Names of the evaluation sets, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            if key.startswith("eval/") and key.endswith("/reward_mean"):
                names[key.removeprefix("eval/").removesuffix("/reward_mean")] = None
    return list(names)


def series(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """(step, value) wherever the metric is there and a number."""
    return [(row["step"], float(row[key])) for row in rows if isinstance(row.get(key), int | float)]


def headline(step: int, total: int | None, row: Row) -> str:
    """One line about what was just logged, or "" where nothing in it is worth a line.

    Steps count from 0 everywhere: the number of a step is the number of rollouts trained on before it, so that a
    rollout's reward and an evaluation with the same number come from the same weights.
    """
    parts = [f"eval {name} {row[f'eval/{name}/reward_mean']:.3f}" for name in eval_names([row])]
    parts += [text.format(row[key]) for key, text in _HEADLINE if isinstance(row.get(key), int | float)]
    if not parts:
        return ""
    spent = sum(phases(row).values())
    where = f"step {step}" if total is None else f"step {step}/{total}"
    return " · ".join([where, *parts, *([f"{spent:.1f} s"] if spent else [])])


def summary_table(rows: Sequence[Row]) -> str:
    """The table printed at the end of a run."""
    lines = [("", "first", "last", "best")]
    for name, key, best in (
        ("reward", "rollout/reward_mean", max),
        ("response length", "rollout/response_length_mean", None),
        ("loss", "train/loss", min),
        ("train/rollout log-prob difference", "train/logprob_abs_diff", None),
    ):
        points = series(rows, key)
        if points:
            values = [value for _, value in points]
            digits = ".1e" if key.endswith("diff") else ".3f"
            at = points[values.index(best(values))] if best else None
            lines.append(
                (
                    name,
                    format(values[0], digits),
                    format(values[-1], digits),
                    f"{at[1]:{digits}} (step {at[0]})" if at else f"max {max(values):{digits}}",
                )
            )
    blocks = [_columns(lines)] if len(lines) > 1 else []
    evals = [("evaluation", "before", "after", "gain")]
    for name in eval_names(rows):
        points = series(rows, f"eval/{name}/reward_mean")
        before, after = points[0][1], points[-1][1]
        evals.append((name, f"{before:.3f}", f"{after:.3f}" if len(points) > 1 else "-", f"{after - before:+.3f}"))
    if len(evals) > 1:
        blocks.append(_columns(evals))
    spent: dict[str, list[float]] = {}
    for row in rows:
        for name, seconds in phases(row).items():
            spent.setdefault(name, []).append(seconds)
    if spent:
        times = [("phase", "total", "mean", "longest")]
        times += [
            (name, duration(sum(s)), f"{sum(s) / len(s):.2f} s", f"{max(s):.2f} s")
            for name, s in sorted(spent.items(), key=lambda item: -sum(item[1]))
        ]
        times.append(("all", duration(sum(sum(s) for s in spent.values())), "", ""))
        blocks.append(_columns(times))
    return "\n\n".join(blocks) if blocks else "nothing was logged"


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], "─" * len(text[0]), *text[1:]])
