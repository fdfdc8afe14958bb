"""Completion of names and values. It must be fast, so it runs kubectl, which reads only the names."""

from __future__ import annotations

import shutil
import subprocess

COMPLETION_SECONDS = 2.0  # the user waits for the completion
RESOURCE = "inferencedeployments.trimtab.dev"


def complete_name(incomplete: str) -> list[str]:
    """Return the names of InferenceDeployments that begin with `incomplete`; empty without a cluster."""
    return [name for name in resource_names() if name.startswith(incomplete)]


def resource_names(namespace: str | None = None, context: str | None = None) -> list[str]:
    """Return the names of a namespace's InferenceDeployments; empty without kubectl or a cluster."""
    program = shutil.which("kubectl")
    if program is None:
        return []
    command = [program, "get", RESOURCE, "-o", "name", f"--request-timeout={COMPLETION_SECONDS:g}s"]
    command += ["-n", namespace] if namespace else []
    command += ["--context", context] if context else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPLETION_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.partition("/")[2] for line in done.stdout.split()]
