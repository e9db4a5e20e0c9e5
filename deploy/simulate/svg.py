"""A drawing in SVG: a few shapes in pixels, the origin at the top left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

INK: Final = "#1f2933"
FAINT: Final = "#616e7c"
GRID: Final = "#e4e7eb"
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
Point = tuple[float, float]


class Drawing:
    def __init__(self, width: float, height: float, title: str) -> None:
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width:g} {height:g}",
                "width": f"{width:g}",
                "height": f"{height:g}",
                "font-family": _FONT,
                "role": "img",
            },
        )
        ElementTree.SubElement(self._root, "title").text = title
        self.rect(0, 0, width, height, fill="#ffffff")

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str, said: str = ""
    ) -> None:
        """`said` is shown under a pointer."""
        self._add("rect", said, x=x, y=y, width=max(0.0, width), height=height, fill=fill)

    def line(self, start: Point, end: Point, *, stroke: str = GRID, width: float = 1) -> None:
        self._add(
            "line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke,
            stroke_width=width,
        )  # fmt: skip

    def circle(self, at: Point, radius: float, *, fill: str, stroke: str, said: str = "") -> None:
        self._add(
            "circle", said, cx=at[0], cy=at[1], r=radius, fill=fill, stroke=stroke, stroke_width=2
        )

    def curve(self, points: Sequence[Point], *, stroke: str, width: float = 1) -> None:
        self._add(
            "polyline", points=_corners(points), fill="none", stroke=stroke, stroke_width=width
        )

    def area(self, points: Sequence[Point], *, fill: str, opacity: float = 1) -> None:
        self._add("polygon", points=_corners(points), fill=fill, fill_opacity=opacity)

    def text(
        self,
        at: Point,
        content: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        weight: str = "normal",
        turned: bool = False,
    ) -> None:
        """`at`: where the base line starts, ends or has its middle, as `anchor` says."""
        more = {"transform": f"rotate(-90 {at[0]:g} {at[1]:g})"} if turned else {}
        self._add(
            "text", x=at[0], y=at[1], font_size=size, fill=fill, text_anchor=anchor,
            font_weight=weight, **more,
        ).text = content  # fmt: skip

    def write(self, file: Path) -> None:
        """Whole, or not at all."""
        ElementTree.indent(self._root, " ")
        written = ElementTree.tostring(self._root, encoding="utf-8", xml_declaration=True)
        part = file.with_name(f"{file.name}.part")
        try:
            part.write_bytes(written)
            part.replace(file)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _add(self, kind: str, said: str = "", **attributes: str | float) -> ElementTree.Element:
        written = {
            name.replace("_", "-"): value
            if isinstance(value, str)
            else f"{value:.2f}".rstrip("0").rstrip(".")
            for name, value in attributes.items()
        }
        element = ElementTree.SubElement(self._root, kind, written)
        if said:
            ElementTree.SubElement(element, "title").text = said
        return element


def text_width(content: str, size: float) -> float:
    """About, of a bold sans-serif font."""
    return 0.64 * size * len(content)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers in [low, high], about so many."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _corners(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
