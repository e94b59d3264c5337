"""Just enough SVG for plots: shapes with escaped text, and an axis with round ticks. Pure."""

from __future__ import annotations

import math
from html import escape

INK, MUTED, GRID, PAPER = "#1f2328", "#656d76", "#d8dee4", "#ffffff"
# Told apart by people with any colour vision (Okabe and Ito).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_FONT = "font-family='system-ui, sans-serif'"


class Drawing:
    """Shapes in drawing order. Lengths are pixels."""

    def __init__(self, width: int, title: str) -> None:
        self._width = width
        self._title = title
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle; one narrower than half a pixel is drawn that wide, so that it is seen."""
        self._shapes.append(
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.5):.2f}' height='{height:.2f}' fill='{fill}'/>"
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float) -> None:
        """A straight line."""
        self._shapes.append(
            f"<line x1='{start[0]:.2f}' y1='{start[1]:.2f}' x2='{end[0]:.2f}' y2='{end[1]:.2f}' "
            f"stroke='{colour}' stroke-width='{width:g}'/>"
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        """A small translucent dot: many at one place look darker."""
        self._shapes.append(f"<circle cx='{x:.2f}' cy='{y:.2f}' r='3' fill='{colour}' fill-opacity='0.55'/>")

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = INK
    ) -> None:
        """A line of text; ``y`` is its base line, ``anchor`` start, middle or end."""
        self._shapes.append(
            f"<text x='{x:.2f}' y='{y:.2f}' text-anchor='{anchor}' font-size='{size}' fill='{colour}' "
            f"{_FONT}>{escape(words, quote=False)}</text>"
        )

    def render(self, height: float) -> str:
        """The whole picture, ``height`` pixels high."""
        shapes = "\n".join(self._shapes)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{self._width}' height='{height:.0f}' "
            f"viewBox='0 0 {self._width} {height:.0f}' role='img'>\n<title>{escape(self._title, quote=False)}</title>\n"
            f"<rect width='100%' height='100%' fill='{PAPER}'/>\n{shapes}\n</svg>\n"
        )


class Axis:
    """Values from 0 to ``top`` on a span of pixels."""

    def __init__(self, top: float, left: float, right: float) -> None:
        self._step = _round_step(top)
        self._top = max(math.ceil(top / self._step) * self._step, self._step)
        self._left, self._right = left, right

    def x(self, value: float) -> float:
        """Where ``value`` lies."""
        return self._left + (self._right - self._left) * value / self._top

    def ticks(self) -> list[tuple[float, str]]:
        """Round values with their labels."""
        count = round(self._top / self._step)
        return [(self._step * index, f"{self._step * index:g}") for index in range(count + 1)]

    def draw(self, drawing: Drawing, top: float, bottom: float, unit: str) -> None:
        """Grid lines between ``top`` and ``bottom``, labels below."""
        for value, label in self.ticks():
            drawing.line((self.x(value), top), (self.x(value), bottom), GRID, 1)
            drawing.text(self.x(value), bottom + 16, label, anchor="middle", size=11, colour=MUTED)
        drawing.text(self._right, bottom + 32, unit, anchor="end", size=11, colour=MUTED)


def _round_step(top: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to ten steps."""
    if top <= 0:
        return 1.0
    raw = top / 6
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor)
