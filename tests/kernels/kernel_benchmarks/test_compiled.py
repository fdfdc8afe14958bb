"""Transfer of compiled kernels between machines."""

from pathlib import Path

from kernel_benchmarks.compiled import ARCHIVE, pack, unpack


def test_packed_kernels_are_unpacked_to_same_paths(tmp_path: Path) -> None:
    made, archive = tmp_path / "made", tmp_path / ARCHIVE
    for name in ("AB/kernel.cubin", "AB/kernel.json", "AB/kernel.ttir", "CD/launcher.so"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    assert pack(archive, made) == 3
    there = tmp_path / "there"
    assert unpack(archive, there) == 3
    found = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert found == {name: name for name in ("AB/kernel.cubin", "AB/kernel.json", "CD/launcher.so")}


def test_nothing_is_packed_without_compiled_kernels(tmp_path: Path) -> None:
    assert pack(tmp_path / ARCHIVE, tmp_path / "none") == 0
    assert not (tmp_path / ARCHIVE).exists()
    assert unpack(tmp_path / ARCHIVE, tmp_path / "made") == 0
    assert (tmp_path / "made").is_dir(), "Triton writes there"
