"""The cache: keys follow content and nothing else; an entry is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools.cache import entry, key_of, tree_key
from devtools.cache_root import cache_root
from devtools.errors import UsageError


def test_the_cache_lies_under_home_unless_the_environment_says_otherwise() -> None:
    assert cache_root({"HOME": "/home/a"}) == Path("/home/a/.cache/trimtab")
    assert cache_root({"HOME": "/home/a", "TRIMTAB_CACHE": "/big/cache"}) == Path("/big/cache")


def test_a_relative_cache_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="relative"):
        cache_root({"TRIMTAB_CACHE": "cache"})


def test_a_key_tells_apart_what_only_joins_to_the_same_bytes() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("ab", "c") == key_of(b"ab", b"c")


def test_a_tree_key_follows_names_and_bytes_but_not_times_or_bytecode(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "tree", tmp_path / "two" / "tree"
    for tree in (one, two):
        (tree / "__pycache__").mkdir(parents=True)
        (tree / "a.py").write_text("a = 1\n")
    (two / "__pycache__" / "a.pyc").write_bytes(b"bytecode")
    assert tree_key([one]) == tree_key([two])
    (two / "a.py").rename(two / "b.py")
    assert tree_key([one]) != tree_key([two])


def test_an_entry_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("content")

    assert entry("thing/v1", make) == entry("thing/v1", make) == tmp_path / "thing" / "v1"
    assert len(made) == 1
    assert (tmp_path / "thing" / "v1" / "file").read_text() == "content"


def test_an_entry_whose_making_failed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        entry("thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
