"""The demo's chart: capacity, preemptions, and each decision at its time."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

from harness.picture import Moment, Move, Trace, read, write


def make_scene(title: str, *moves: Move) -> Trace:
    moments = [
        Moment(at=1000.0 + second, kv_used_tokens=90.0 * second, kv_tokens=2208 if second < 20 else 4176,
               preemptions=min(second, 20) / 4, running=min(second, 16), waiting=0.0)
        for second in range(60)
    ]  # fmt: skip
    return Trace(title, moments, list(moves))


def test_picture_has_column_per_scene_and_labels_decisions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.svg"
    scenes = [
        make_scene("with headroom", Move(1020.0, "0.74 → 0.81"), Move(1040.0, "0.81 → 0.9")),
        make_scene("without"),
    ]
    write(scenes, "one caption", path)
    texts = [element.text for element in xml.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("with headroom", "without", "0.74 → 0.81", "0.81 → 0.9", "one caption", "KV cache, tokens"):
        assert expected in texts


def test_picture_can_be_drawn_again_from_its_data(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    write([make_scene("a", Move(1020.0, "moved"))], "caption", first)
    write(*read(first.with_suffix(".json")), second)
    assert first.read_bytes() == second.read_bytes()
