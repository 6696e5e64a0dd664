#!/usr/bin/env python3
"""Draws the loss curve of a run from its metrics.jsonl: training loss a step, evaluation points.

Pillow only: drawn at three times the size and scaled down, which gives smooth lines without a
plotting library in the environment.
"""

import sys

# This folder holds a tokenize.py; the standard library's must come first for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]

SCALE = 3
WIDTH, HEIGHT = 960, 540
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 64, 58
INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
FAINT, TRAIN, EVAL = "#b9d3ee", "#2563a8", "#d9480f"


class MetricsError(Exception):
    """The metrics file cannot be drawn; the message says why."""


class Metrics(NamedTuple):
    train: list[Point]
    evaluation: list[Point]


def read_metrics(path: Path) -> Metrics:
    """(step, loss) points. The last line may be cut off: a run that is still going is drawn too."""
    train: list[Point] = []
    evaluation: list[Point] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            step = float(entry["step"])
            for key, points in (("loss", train), ("eval_loss", evaluation)):
                value = entry.get(key)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    points.append((step, float(value)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                break
            raise MetricsError(f"{path}:{number}: no metrics line ({error})") from error
    if not train and not evaluation:
        raise MetricsError(f"{path}: holds no loss")
    return Metrics(train, evaluation)


def smooth(points: list[Point]) -> list[Point]:
    """Exponential mean over about a twentieth of the run, started without bias."""
    decay = 1 - 1 / max(2.0, len(points) / 20)
    mean = weight = 0.0
    out: list[Point] = []
    for step, value in points:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append((step, mean / weight))
    return out


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values that cover low to high in about `count` steps."""
    raw = max(high - low, 1e-9) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


class Chart:
    """A white canvas with axes; coordinates are data coordinates."""

    def __init__(self, metrics: Metrics, title: str) -> None:
        points = metrics.train + metrics.evaluation
        steps, losses = [p[0] for p in points], [p[1] for p in points]
        self.x_ticks = ticks(min(min(steps), 0), max(steps), 8)
        self.y_ticks = ticks(min(min(losses), 0), max(losses), 6)
        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
        self.draw = ImageDraw.Draw(self.image)
        self._axes(title, max(steps))

    def place(self, point: Point) -> Point:
        x0, x1 = self.x_ticks[0], self.x_ticks[-1]
        y0, y1 = self.y_ticks[0], self.y_ticks[-1]
        across = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return across * SCALE, up * SCALE

    def text(self, place: Point, text: str, size: int, anchor: str, fill: str = INK) -> None:
        font = ImageFont.load_default(size * SCALE)
        self.draw.text((place[0] * SCALE, place[1] * SCALE), text, fill, font, anchor)

    def _axes(self, title: str, last_step: float) -> None:
        self.text((LEFT, 16), title, 18, "lt")
        for value in self.y_ticks:
            left = self.place((self.x_ticks[0], value))
            right = self.place((self.x_ticks[-1], value))
            self.draw.line([left, right], GRID, SCALE)
            self.text((LEFT - 10, left[1] / SCALE), f"{value:g}", 13, "rm", MUTED)
        for value in self.x_ticks:
            x, y = self.place((value, self.y_ticks[0]))
            self.draw.line([(x, y), (x, y + 5 * SCALE)], MUTED, SCALE)
            self.text((x / SCALE, y / SCALE + 10), f"{value:g}", 13, "mt", MUTED)
        ends = [(self.x_ticks[0], self.y_ticks[0]), (self.x_ticks[-1], self.y_ticks[0])]
        self.draw.line([self.place(end) for end in ends], MUTED, SCALE)
        self.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10), "step", 14, "mb", MUTED)
        self.text((LEFT - 10, TOP - 12), "loss", 14, "rb", MUTED)

    def line(self, points: list[Point], colour: str, width: float) -> None:
        placed = [self.place(point) for point in points]
        if len(placed) > 1:
            self.draw.line(placed, colour, round(width * SCALE), joint="curve")
        elif placed:
            self.dots(points, colour, width)

    def dots(self, points: list[Point], colour: str, radius: float) -> None:
        for x, y in map(self.place, points):
            r = radius * SCALE
            self.draw.ellipse([x - r, y - r, x + r, y + r], colour, "white", SCALE)

    def legend(self, entries: list[tuple[str, str]]) -> None:
        x = float(WIDTH - RIGHT)
        for label, colour in reversed(entries):
            self.text((x, 26), label, 14, "rm", INK)
            x -= ImageFont.load_default(14 * SCALE).getlength(label) / SCALE + 8
            r = 5
            box = [(x - 2 * r) * SCALE, (26 - r) * SCALE, x * SCALE, (26 + r) * SCALE]
            self.draw.ellipse(box, colour)
            x -= 2 * r + 22


def draw(metrics: Metrics, title: str) -> Image.Image:
    chart = Chart(metrics, title)
    entries: list[tuple[str, str]] = []
    if metrics.train:
        chart.line(metrics.train, FAINT, 1.4)
        chart.line(smooth(metrics.train), TRAIN, 2.4)
        entries.append((f"training, last {smooth(metrics.train)[-1][1]:.3f}", TRAIN))
    if metrics.evaluation:
        chart.line(metrics.evaluation, EVAL, 2)
        chart.dots(metrics.evaluation, EVAL, 5)
        first, last = metrics.evaluation[0][1], metrics.evaluation[-1][1]
        numbers = f"{first:.3f} to {last:.3f}" if len(metrics.evaluation) > 1 else f"{last:.3f}"
        entries.append((f"held-out, {numbers}", EVAL))
    chart.legend(entries)
    return chart.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def save(image: Image.Image, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, "PNG", optimize=True)
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("-o", "--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--title", default="Fine-tuning loss")
    arguments = parser.parse_args()
    try:
        save(draw(read_metrics(arguments.metrics), arguments.title), arguments.output)
    except (MetricsError, OSError, UnicodeDecodeError) as error:
        print(f"plot_metrics: error: {error}", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
