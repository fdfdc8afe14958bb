"""The cache: keys depend only on content, and entries are either complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools.cache import entry, key_of, tree_key
from devtools.cache_root import cache_root
from devtools.errors import UsageError


def test_cache_root_defaults_to_home() -> None:
    assert cache_root({"HOME": "/home/a"}) == Path("/home/a/.cache/trimtab")
    assert cache_root({"HOME": "/home/a", "TRIMTAB_CACHE": "/big/cache"}) == Path("/big/cache")


def test_relative_cache_root_is_rejected() -> None:
    with pytest.raises(UsageError, match="relative"):
        cache_root({"TRIMTAB_CACHE": "cache"})


def test_key_depends_on_part_boundaries() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("ab", "c") == key_of(b"ab", b"c")


def test_tree_key_depends_on_names_and_bytes_only(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "tree", tmp_path / "two" / "tree"
    for tree in (one, two):
        (tree / "__pycache__").mkdir(parents=True)
        (tree / "a.py").write_text("a = 1\n")
    (two / "__pycache__" / "a.pyc").write_bytes(b"bytecode")
    assert tree_key([one]) == tree_key([two])
    (two / "a.py").rename(two / "b.py")
    assert tree_key([one]) != tree_key([two])


def test_entry_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("content")

    assert entry("thing/v1", make) == entry("thing/v1", make) == tmp_path / "thing" / "v1"
    assert len(made) == 1
    assert (tmp_path / "thing" / "v1" / "file").read_text() == "content"


def test_failed_entry_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        entry("thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
