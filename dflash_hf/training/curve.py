"""The training curve as an SVG file: loss and acceptance length against updates.

Written by hand because a plotting library is no dependency of this package, and two line charts need none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _MARGIN, _GAP = 420, 260, 48, 32
_PANELS = (("loss", "loss"), ("block_acceptance_length", "block acceptance length"))
_COLOURS = {"training": "#4269d0", "evaluation": "#efb118"}


def curve_svg(log_history: list[dict[str, Any]]) -> str | None:
    """Two charts of a Trainer's `state.log_history`; None if nothing was logged twice.

    Args:
        log_history: entries with `step`, and `loss`, `eval_loss`, `block_acceptance_length` or
            `eval_block_acceptance_length`.
    """
    panels = []
    for number, (key, title) in enumerate(_PANELS):
        lines = {
            name: [(entry["step"], float(entry[prefix + key])) for entry in log_history if prefix + key in entry]
            for name, prefix in (("training", ""), ("evaluation", "eval_"))
        }
        if any(len(points) > 1 for points in lines.values()):
            panels.append(_panel(title, lines, left=number * (_WIDTH + _GAP)))
    if not panels:
        return None
    width = len(_PANELS) * _WIDTH + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#333"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(title: str, lines: dict[str, list[tuple[int, float]]], *, left: int) -> str:
    points = [point for line in lines.values() for point in line]
    last = max(step for step, _ in points) or 1
    low, high = min(value for _, value in points), max(value for _, value in points)
    span = (high - low) or 1.0
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def place(step: int, value: float) -> tuple[float, float]:
        return _MARGIN + step / last * inner_width, _MARGIN + (high - value) / span * inner_height

    parts = [f'<text x="{_MARGIN}" y="20" font-size="13">{title}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * span
        _, y = place(0, value)
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        step = round(share * last)
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">updates</text>')
    for number, (name, line) in enumerate(lines.items()):
        if not line:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        colour = _COLOURS[name]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(line) == 1:
            x, y = place(*line[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _MARGIN - 130 + 70 * number}" y="20" fill="{colour}">{name}</text>')
    return f'<g transform="translate({left} 0)">{"".join(parts)}</g>'


def write_curve(log_history: list[dict[str, Any]], path: Path) -> None:
    """Write `curve_svg` of a run to `path`, if anything was logged twice."""
    svg = curve_svg(log_history)
    if svg is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(svg, encoding="utf-8")
    os.replace(temporary, path)
