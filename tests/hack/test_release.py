"""The parts of a release that need no network: notes, images, chart, checksums, and what is skipped."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BAKE_FILE = (REPOSITORY / "docker-bake.hcl").read_text()
SPEC = importlib.util.spec_from_file_location("hack_release", REPOSITORY / "hack" / "release.py")
assert SPEC is not None
assert SPEC.loader is not None
hack_release = importlib.util.module_from_spec(SPEC)
sys.modules["hack_release"] = hack_release  # dataclasses look their module up
SPEC.loader.exec_module(hack_release)
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\n### Added\n- A.\n\n## [0.1.0]\n\n- B.\n"
CREDENTIALS = ("REGISTRY", "COSIGN_KEY", "TWINE_PASSWORD", "GH_TOKEN")
VERSION = (REPOSITORY / "VERSION").read_text().strip()


@pytest.fixture
def release(tmp_path: Path) -> Any:
    return hack_release.Release("0.2.0", tmp_path, is_dry_run=True)


def test_notes_are_the_changelog_section() -> None:
    assert hack_release.release_notes(CHANGELOG, "0.2.0") == "### Added\n- A.\n"
    assert hack_release.release_notes(CHANGELOG, "0.1.0") == "- B.\n"


@pytest.mark.parametrize("version", ["0.3.0", "0.2"])
def test_notes_of_unknown_version_are_an_error(version: str) -> None:
    with pytest.raises(hack_release.ReleaseError, match="no entries"):
        hack_release.release_notes(CHANGELOG, version)


def test_current_version_has_notes() -> None:
    assert hack_release.release_notes((REPOSITORY / "CHANGELOG.md").read_text(), VERSION)


def test_image_list_has_registry_and_version() -> None:
    assert hack_release.tags_in_bake_file(BAKE_FILE, "r.example/t", "0.2.0") == [
        "r.example/t/trimtab-engine:0.2.0",
        "r.example/t/trimtab-engine:0.2.0-cpu",
        "r.example/t/trimtab-operator:0.2.0",
        "r.example/t/trimtab-router:0.2.0",
    ]


def test_chart_without_helm_has_its_layout(release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hack_release.package_chart(release)
    with tarfile.open(tmp_path / "trimtab-chart-0.2.0.tgz") as archive:
        names = archive.getnames()
    assert names[0] == "trimtab/Chart.yaml"
    assert {"trimtab/values.yaml", "trimtab/templates/deployment.yaml", "trimtab/templates/_helpers.tpl"} <= set(names)
    assert "tar" in release.done[0]


def test_checksums_cover_every_artifact(release: Any, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "manifest.json").touch()
    hack_release.write_checksums(release)
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"


def test_dry_run_publishes_nothing(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "given")
    monkeypatch.setattr(hack_release, "run", lambda *words, **_: pytest.fail(f"ran {words}"))
    hack_release.publish(release)
    assert release.done == []
    assert len(release.skipped) == 5


def test_missing_credentials_are_named(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    release.is_dry_run = False
    hack_release.publish(release)
    assert "upload to PyPI: TWINE_PASSWORD not set" in release.skipped
    assert "sign images: REGISTRY and COSIGN_KEY not set" in release.skipped


def test_manifest_lists_artifacts_and_steps(release: Any, tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    release.report("built a.whl")
    hack_release.write_manifest(release)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["artifacts"], manifest["done"], manifest["dryRun"]) == (["a.whl"], ["built a.whl"], True)
