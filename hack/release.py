"""Make every artifact of a release in dist/, and publish what there are credentials for.

    python3 hack/release.py [--dry-run]

Artifacts: wheel and sdist, the Helm chart, the list of images, an SBOM (CycloneDX) for operator and engine, release
notes from CHANGELOG.md, SHA256SUMS, and manifest.json, which lists them with what was done and skipped.

Publishing, each step only without --dry-run and with its credentials:
- REGISTRY: push images (docker buildx bake) and chart (helm push), after `docker login` and `helm registry login`.
- TWINE_PASSWORD: upload wheel and sdist to PyPI.
- COSIGN_KEY: sign SHA256SUMS; with REGISTRY also the images.
- GH_TOKEN: create the GitHub release of the tag.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CHART = REPOSITORY / "charts" / "trimtab"
TOOLS = REPOSITORY / "build" / "release-tools"
EXTRAS = ("operator", "engine", "router", "endpoint-picker")
TARGET = re.compile(
    r'^target "(?P<name>[^"]+)" \{.*?dockerfile = "(?P<file>[^"]+)".*?image\("(?P<image>[^"]+)", "(?P<suffix>[^"]*)"\)',
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Release:
    """One release: where its artifacts are written, and the log of its steps for manifest.json."""

    version: str
    output: Path
    is_dry_run: bool
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def report(self, step: str) -> None:
        self.done.append(step)
        print(f"release: {step}", flush=True)

    def skip(self, step: str, reason: str) -> None:
        self.skipped.append(f"{step}: {reason}")
        print(f"release: skipped {step}: {reason}", flush=True)


class ReleaseError(Exception):
    """A step failed; the message is one line for the terminal."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a command in the repository and return its standard output.

    Raises:
        ReleaseError: it failed; the message contains the end of its standard error.
    """
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        words = " ".join(str(word) for word in command[:4])
        raise ReleaseError(
            f"{words} … failed with exit code {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}"
        )
    return done.stdout


def ensure_tools() -> Path:
    """Return the Python of a virtual environment with the pinned release tools."""
    pins = REPOSITORY / "hack" / "release-requirements.txt"
    stamp = TOOLS / ".ready"
    if not stamp.is_file() or stamp.read_text() != pins.read_text():
        venv.create(TOOLS, clear=True, with_pip=True)
        run(TOOLS / "bin" / "pip", "install", "--quiet", "--requirement", pins)
        stamp.write_text(pins.read_text())
    return TOOLS / "bin" / "python"


def build_packages(release: Release, python: Path) -> None:
    run(python, "-m", "build", "--outdir", release.output, REPOSITORY)
    release.report(f"built {', '.join(path.name for path in sorted(release.output.glob('trimtab-*')))}")


def package_chart(release: Release) -> None:
    """Package the chart with helm, or as helm does: a gzipped tar with one folder named like the chart."""
    if shutil.which("helm"):
        run("helm", "package", CHART, "--destination", release.output)
        tool = "helm"
    else:
        with tarfile.open(release.output / f"trimtab-chart-{release.version}.tgz", "w:gz") as archive:
            for path in sorted(CHART.rglob("*"), key=lambda path: (path.name != "Chart.yaml", path)):
                if path.is_file() and path.name != ".helmignore":
                    archive.add(path, Path(CHART.name) / path.relative_to(CHART))
        tool = "tar: helm is not on PATH"
    for packaged in release.output.glob(f"trimtab-{release.version}.tgz"):
        packaged.rename(release.output / f"trimtab-chart-{release.version}.tgz")  # the sdist has a similar name
    release.report(f"packaged trimtab-chart-{release.version}.tgz ({tool})")


def list_images(release: Release) -> None:
    """Write images.txt: the tags that `docker buildx bake` builds, read from docker-bake.hcl if buildx is missing."""
    registry = os.environ.get("REGISTRY", "")
    environment = {"REGISTRY": registry, "VERSION": release.version}
    try:
        plan = json.loads(run("docker", "buildx", "bake", "--print", "all", environment=environment))
        release.images = sorted(tag for target in plan["target"].values() for tag in target["tags"])
        tool = "docker buildx bake --print"
    except (OSError, ReleaseError, json.JSONDecodeError):
        release.images = tags_in_bake_file((REPOSITORY / "docker-bake.hcl").read_text(), registry, release.version)
        tool = "docker-bake.hcl: docker buildx is not available"
    (release.output / "images.txt").write_text("".join(f"{image}\n" for image in release.images))
    release.report(f"listed {len(release.images)} images ({tool})")


def tags_in_bake_file(text: str, registry: str, version: str) -> list[str]:
    """Return the tag of each target that has a Dockerfile."""
    prefix = f"{registry}/" if registry else ""
    return sorted(f"{prefix}{found['image']}:{version}{found['suffix']}" for found in TARGET.finditer(text))


def write_sboms(release: Release, python: Path) -> None:
    """Write one CycloneDX SBOM per extra: the packages that pip installs with constraints.txt."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in EXTRAS:
        report = json.loads(
            run(
                python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
                "--constraint", "constraints.txt", *extras[extra],
            )
        )  # fmt: skip
        found = sorted((item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"])
        requirements = TOOLS / f"requirements-{extra}.txt"
        requirements.write_text("".join(f"{name}=={version.partition('+')[0]}\n" for name, version in found))
        target = release.output / f"sbom-{extra}.cdx.json"
        command = ("-m", "cyclonedx_py", "requirements", requirements, "--pyproject", "pyproject.toml")
        run(python, *command, "--output-reproducible", "--of", "JSON", "--output-file", target)
        release.report(f"wrote {target.name}: {len(found)} packages")


def release_notes(changelog: str, version: str) -> str:
    """Return the section of `version` without its heading.

    Raises:
        ReleaseError: the changelog has no such section, or an empty one.
    """
    found = re.search(rf"^## \[{re.escape(version)}\].*?$\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md: no entries below '## [{version}]'; move them there from [Unreleased]")
    return found[1].strip() + "\n"


def write_checksums(release: Release) -> None:
    files = sorted(path for path in release.output.iterdir() if path.name not in ("SHA256SUMS", "manifest.json"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (release.output / "SHA256SUMS").write_text("".join(lines))
    release.report(f"wrote SHA256SUMS of {len(files)} files")


def publish(release: Release) -> None:
    """Push and sign what there are credentials for."""
    registry, key, version = os.environ.get("REGISTRY", ""), os.environ.get("COSIGN_KEY", ""), release.version
    sums, signature = release.output / "SHA256SUMS", release.output / "SHA256SUMS.sig"
    chart = release.output / f"trimtab-chart-{version}.tgz"
    packages = [*release.output.glob("*.whl"), *release.output.glob("*.tar.gz")]
    files = [*release.output.iterdir(), *([signature] if key else [])]
    steps: list[tuple[str, list[str], list[tuple[str | Path, ...]]]] = [
        ("sign SHA256SUMS", ["COSIGN_KEY"], [
            ("cosign", "sign-blob", "--yes", "--key", key, "--output-signature", signature, sums),
        ]),
        ("push images and chart", ["REGISTRY"], [
            ("docker", "buildx", "bake", "--push", "all"),
            ("helm", "push", chart, f"oci://{registry}/charts"),
        ]),
        ("sign images", ["REGISTRY", "COSIGN_KEY"], [
            ("cosign", "sign", "--yes", "--key", key, image) for image in release.images
        ]),
        ("upload to PyPI", ["TWINE_PASSWORD"], [(TOOLS / "bin" / "twine", "upload", *packages)]),
        ("create the GitHub release", ["GH_TOKEN"], [
            ("gh", "release", "create", f"v{version}", "--notes-file", release.output / "RELEASE_NOTES.md", *files),
        ]),
    ]  # fmt: skip
    for step, needed, commands in steps:
        missing = [name for name in needed if not os.environ.get(name)]
        if release.is_dry_run or missing:
            release.skip(step, f"{' and '.join(missing)} not set" if missing else "dry run")
            continue
        for command in commands:
            run(*command, environment={"VERSION": version})
        release.report(step)


def write_manifest(release: Release) -> None:
    files = sorted(path.name for path in release.output.iterdir() if path.name != "manifest.json")
    manifest = {
        "version": release.version,
        "commit": run("git", "rev-parse", "HEAD").strip(),
        "dryRun": release.is_dry_run,
        "artifacts": files,
        "images": release.images,
        "done": release.done,
        "skipped": release.skipped,
    }
    (release.output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def make(release: Release) -> None:
    run(sys.executable, "hack/version.py", "--check")
    shutil.rmtree(release.output, ignore_errors=True)
    release.output.mkdir(parents=True)
    python = ensure_tools()
    build_packages(release, python)
    package_chart(release)
    list_images(release)
    write_sboms(release, python)
    notes = release_notes((REPOSITORY / "CHANGELOG.md").read_text(), release.version)
    (release.output / "RELEASE_NOTES.md").write_text(notes)
    release.report(f"wrote RELEASE_NOTES.md: {len(notes.splitlines())} lines")
    write_checksums(release)
    publish(release)
    write_manifest(release)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make every artifact of a release in dist/.")
    parser.add_argument("--dry-run", action="store_true", help="sign and push nothing")
    is_dry_run = parser.parse_args().dry_run
    try:
        make(Release((REPOSITORY / "VERSION").read_text().strip(), REPOSITORY / "dist", is_dry_run))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
