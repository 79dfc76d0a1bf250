"""Pages without scripts and external resources, and line and scatter charts in SVG. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT, _MARGIN = 640, 320, 48
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7ea4", "#bf3989", "#57606a")
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "pre{overflow-x:auto}svg{max-width:100%}"
)

Line = tuple[str, Sequence[tuple[float, float]]]
"""Name and points of a line, with both coordinates between 0 and 1."""


class Dot(NamedTuple):
    """A point of a scatter chart, with coordinates between 0 and 1.

    ``marked`` dots are large and show their text.
    """

    x: float
    y: float
    text: str
    marked: bool = False


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page of (heading, HTML) sections."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in sections)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>{body}</body></html>"
    )


def chart(lines: Sequence[Line], ticks: Sequence[tuple[float, str]], top: str, dots: Sequence[Dot] = ()) -> str:
    """Return an SVG of lines and dots.

    Args:
        lines: drawn in different colours, with their names as legend.
        ticks: (place, text) on the x axis.
        top: text of the y axis at 1.
        dots: drawn over the lines; each has its text as tooltip.
    """
    pieces = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img xmlns='http://www.w3.org/2000/svg' font-size=12>"]
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    pieces.append(f"<rect x={_MARGIN} y={_MARGIN} width={wide} height={high} fill=none stroke='#d0d7de'/>")
    pieces.append(f"<text x=0 y={_MARGIN - 8}>{html.escape(top)}</text><text x=0 y={_HEIGHT - _MARGIN}>0</text>")
    for place, text in ticks:
        x = _MARGIN + place * wide
        pieces.append(f"<text x={x:.1f} y={_HEIGHT - _MARGIN + 16} text-anchor=middle>{html.escape(text)}</text>")
    for number, (name, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{_MARGIN + x * wide:.1f},{_MARGIN + (1 - y) * high:.1f}" for x, y in points)
        pieces.append(f"<polyline points='{path}' fill=none stroke='{colour}' stroke-width=2 />")
        legend = _MARGIN + 16 * (number + 1)
        pieces.append(f"<text x={_MARGIN + 8} y={legend} fill='{colour}'>{html.escape(name)}</text>")
    for dot in dots:
        x, y = _MARGIN + dot.x * wide, _MARGIN + (1 - dot.y) * high
        colour = _COLOURS[2] if dot.marked else _COLOURS[-1]
        pieces.append(
            f"<circle cx={x:.1f} cy={y:.1f} r={6 if dot.marked else 3} fill='{colour}'>"
            f"<title>{html.escape(dot.text)}</title></circle>"
        )
        if dot.marked:
            anchor = "end" if dot.x > 0.5 else "start"
            label = html.escape(dot.text.partition(":")[0])
            pieces.append(f"<text x={x:.1f} y={y - 10:.1f} text-anchor={anchor} fill='{colour}'>{label}</text>")
    return "".join([*pieces, "</svg>"])
