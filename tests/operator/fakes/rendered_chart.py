"""The chart as helm renders it, for tests that read what it says."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts" / "trimtab"
NAMESPACE = "trimtab-system"
NO_HELM = "no helm: set TRIMTAB_HELM, put helm on PATH, or run `make cluster-up` once"
Manifest = dict[str, Any]


def find_helm() -> str | None:
    """TRIMTAB_HELM, then PATH, then what `make demo` keeps in the cache."""
    named = os.environ.get("TRIMTAB_HELM")
    if named:
        return named
    cache = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser()
    cached = sorted(path for path in cache.glob("tools/**/helm") if path.is_file() and os.access(path, os.X_OK))
    return shutil.which("helm") or (str(cached[0]) if cached else None)


HELM = find_helm()


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, timeout=240)


def render(*settings: str, options: Sequence[str] = ()) -> list[Manifest]:
    """Every manifest, fresh for each who asks."""
    return [manifest for manifest in yaml.safe_load_all(_rendered(settings, tuple(options))) if manifest]


@functools.cache
def _rendered(settings: tuple[str, ...], options: tuple[str, ...]) -> str:
    values = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "trimtab", str(CHART), "--namespace", NAMESPACE, *values, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only one of its kind, or of that name."""
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def rights(*roles: Manifest) -> set[tuple[str, str, str, str | None]]:
    """(group, resource, verb, the only name it holds for)."""
    return {
        (group, resource, verb, name)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
