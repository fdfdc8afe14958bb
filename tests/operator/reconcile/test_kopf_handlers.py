"""What is registered with Kopf."""

from __future__ import annotations

from unittest.mock import Mock

import kopf
from trimtab_operator.reconcile.kopf_handlers import build_registry, build_settings


def test_no_handler_asks_for_a_finalizer() -> None:
    """A resource can be deleted while no operator runs: ADR-0005."""
    handlers = build_registry(Mock())._spawning._handlers
    assert len(handlers) == 1
    assert not any(handler.requires_finalizer for handler in handlers)


def test_kopf_writes_nothing_into_resources() -> None:
    """The operator has no right to: a resource is its owner's."""
    persistence, patch = build_settings().persistence, kopf.Patch()
    body = kopf.Body({"metadata": {"name": "m"}, "spec": {"model": {}}})
    persistence.progress_storage.touch(body=body, patch=patch, value="now")
    persistence.diffbase_storage.store(body=body, patch=patch, essence=persistence.diffbase_storage.build(body=body))
    assert not patch


def test_kopf_copies_no_resource_to_compare_it() -> None:
    body = kopf.Body({"metadata": {"name": "m", "labels": {"a": "b"}}, "spec": {"model": {}}})
    assert build_settings().persistence.diffbase_storage.build(body=body) == {}


def test_a_watch_that_died_without_a_word_is_begun_anew_within_75_seconds() -> None:
    watching = build_settings().watching
    assert watching.server_timeout is not None
    assert watching.client_timeout is not None
    assert watching.server_timeout < watching.client_timeout <= 75 - 10  # and the time to connect


def test_kopf_watches_resources_alone() -> None:
    """Their children are the cache's to watch."""
    settings, registry = build_settings(), build_registry(Mock())
    assert settings.scanning.disabled
    assert not registry._watching._handlers
