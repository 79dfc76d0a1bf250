"""Charts in SVG and the pages around them."""

from __future__ import annotations

from remora_tools.charts import Dot, chart, page


def test_lines_and_dots_lie_inside_the_frame() -> None:
    text = chart([("a <line>", [(0.0, 0.0), (1.0, 1.0)])], [(0.5, "half")], "10 ms", [Dot(1.0, 0.5, "best: it", True)])
    assert "points='48.0,272.0 592.0,48.0'" in text
    assert "cx=592.0 cy=160.0" in text
    assert "a &lt;line&gt;" in text
    assert ">best</text>" in text
    assert "<title>best: it</title>" in text


def test_an_unmarked_dot_has_only_a_tooltip() -> None:
    text = chart([], [], "1", [Dot(0.2, 0.2, "a: b")])
    assert text.count("<circle") == 1
    assert ">a</text>" not in text


def test_a_page_escapes_its_headings() -> None:
    text = page("<title>", [("A & B", "<p>kept</p>")])
    assert "<h1>&lt;title&gt;</h1>" in text
    assert "<h2>A &amp; B</h2><p>kept</p>" in text
