"""Fixtures of the user stories: one cluster, one installed chart, a namespace per story.

The stories need a cluster that is up (`python3 e2e/cluster up`, or CLUSTER=current) and drive it as a user would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.deployment import Deployment, sample
from harness.install import Installation, leave_others_alone
from harness.kube import Kube, KubectlError
from harness.report import facts, say, speak_to
from harness.target import NoCluster, Target, connect, images_in_cluster
from harness.trim import CALM_SECONDS, SOAK_CALM_SECONDS
from harness.wait import Waiter

STORY_SECONDS = 3600.0  # far above any deadline of a story, soaking or not: pytest-timeout is the last resort
LAST = ("test_pages.py", "test_readme.py")  # they install the chart themselves: after the stories that share one

Apply = Callable[..., Deployment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="stay under load far longer where that shows something")


@pytest.fixture(scope="session")
def calm_seconds(request: pytest.FixtureRequest) -> float:
    """How long the load must go on without a preemption after the operator has acted."""
    return SOAK_CALM_SECONDS if request.config.getoption("--soak") else CALM_SECONDS


@pytest.hookimpl(trylast=True)  # the reporter is registered by then
def pytest_configure(config: pytest.Config) -> None:
    """Progress lines go past pytest's capture, so they are seen while a story runs."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None or capture is None:
        return

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(line)

    speak_to(show)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(STORY_SECONDS))
    items.sort(key=lambda item: LAST.index(item.path.name) + 1 if item.path.name in LAST else 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for fact in facts():
        terminalreporter.write_line(f"measured: {fact}")


@pytest.fixture(scope="session")
def target() -> Target:
    try:
        found = connect()
        leave_others_alone(found)
    except NoCluster as error:
        pytest.exit(f"{error}\nbring one up with `python3 e2e/cluster up`, or set CLUSTER=current", returncode=2)
    say(f"running on {found.describe()}")
    return found


@pytest.fixture(scope="session")
def kube(target: Target) -> Kube:
    return target.kube


@pytest.fixture(scope="session")
def installation(target: Target) -> Iterator[Installation]:
    """The chart, installed once for all stories and removed at the end."""
    installed = Installation(target.kube, images_in_cluster())
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture(scope="session")
def used_namespaces(kube: Kube) -> Iterator[list[str]]:
    """The stories' namespaces. They go while the next story runs; at the end of all, nothing may be left."""
    names: list[str] = []
    yield names
    for name in names:
        try:
            kube.delete("namespace", name, wait=True)
        except KubectlError as error:
            pytest.fail(f"namespace {name} could not be deleted: {error}\n{Waiter(kube, name).evidence()}")


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, kube: Kube, used_namespaces: list[str]) -> Iterator[str]:
    """`trimtab-e2e-STORY`, empty, deleted after the story."""
    story = re.sub(r"^.*test_", "", request.module.__name__).replace("_", "-")
    name = f"trimtab-e2e-{story}"
    kube.delete("namespace", name, wait=True)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    used_namespaces.append(name)
    yield name
    kube.delete("namespace", name)


@pytest.fixture(scope="module")
def apply(installation: Installation, namespace: str) -> Apply:
    """Apply the sample with changes to its spec, under a name, in the story's namespace."""

    def apply_sample(name: str | None = None, **changes: Any) -> Deployment:
        manifest = sample(name, image=installation.images.model, **changes)
        installation.kube.apply(manifest, namespace=namespace)
        return Deployment(installation.kube, namespace, manifest["metadata"]["name"])

    return apply_sample


@pytest.fixture(scope="module")
def ready(apply: Apply) -> Deployment:
    """The sample, applied and Ready: the state that most stories start from."""
    deployment = apply()
    deployment.ready()
    return deployment
