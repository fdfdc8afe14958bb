"""Access to a Service or pod from outside the cluster by `kubectl port-forward` on a free local port."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from harness.kube import Kube

FORWARD_SECONDS = 60.0
ANSWER_SECONDS = 120.0


class NoForward(Exception):
    """kubectl port-forward failed, or the forwarded target did not respond."""


@contextmanager
def port_forward(
    kube: Kube, namespace: str, target: str, port: int, *, health: str | None = "/health"
) -> Iterator[str]:
    """Forward a port to `target` (`svc/NAME`, `pod/NAME`), wait until `health` returns 200, and yield the local URL.

    Raises:
        NoForward: kubectl failed (with its output), or `health` did not return 200 in time.
    """
    process, url = _start(kube, namespace, target, port)
    try:
        if health is not None:
            _await_answer(url + health)
        yield url
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _start(kube: Kube, namespace: str, target: str, port: int) -> tuple[subprocess.Popen[str], str]:
    """Start kubectl and read the chosen port; retries while the target has no ready pod."""
    end = time.monotonic() + FORWARD_SECONDS
    while True:
        process = subprocess.Popen(
            [kube.kubectl, "port-forward", "-n", namespace, target, f":{port}", "--address=127.0.0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=kube.full_environment(),
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if found:
            return process, f"http://127.0.0.1:{found.group(1)}"
        process.kill()
        rest, _ = process.communicate()
        if time.monotonic() >= end:
            raise NoForward(f"kubectl port-forward to {target} in {namespace} failed: {line}{rest}")
        time.sleep(1.0)


def _await_answer(url: str) -> None:
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            answer = httpx.get(url, timeout=20.0)
            if answer.status_code == 200:
                return
            seen = f"{answer.status_code} {answer.text[:200]}"
        except httpx.HTTPError as error:
            seen = str(error)
        if time.monotonic() >= end:
            raise NoForward(f"{url} did not answer 200 within {ANSWER_SECONDS:.0f} s: {seen}")
        time.sleep(0.5)
