"""The demo's picture says what was read: capacity, preemptions, and each decision where it was taken."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

from harness.picture import Moment, Move, Trace, read, write


def a_scene(title: str, *moves: Move) -> Trace:
    moments = [
        Moment(at=1000.0 + second, kv_used_tokens=90.0 * second, kv_tokens=2208 if second < 20 else 4176,
               preemptions=min(second, 20) / 4, running=min(second, 16), waiting=0.0)
        for second in range(60)
    ]  # fmt: skip
    return Trace(title, moments, list(moves))


def test_the_picture_has_a_column_for_each_scene_and_names_each_decision(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.svg"
    scenes = [a_scene("with headroom", Move(1020.0, "0.74 → 0.81"), Move(1040.0, "0.81 → 0.9")), a_scene("without")]
    write(scenes, "one caption", path)
    texts = [element.text for element in xml.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("with headroom", "without", "0.74 → 0.81", "0.81 → 0.9", "one caption", "KV cache, tokens"):
        assert expected in texts


def test_the_figures_beside_the_picture_draw_it_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    write([a_scene("a", Move(1020.0, "moved"))], "caption", first)
    write(*read(first.with_suffix(".json")), second)
    assert first.read_bytes() == second.read_bytes()
