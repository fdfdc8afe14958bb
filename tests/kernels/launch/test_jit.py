"""Counting of Triton's compilations."""

import pytest
from trimtab_kernels.launch import jit


@pytest.mark.skipif(not jit.HAS_TRITON, reason="counts what Triton compiles")
def test_compilations_are_counted_once_and_other_hooks_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    runtime = jit.triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **details: reported.append(details["repr"]))
    jit.watch_compilations()
    jit.watch_compilations()
    before = jit.num_compilations()
    runtime.jit_post_compile_hook(repr="kernel(...)")
    assert jit.num_compilations() == before + 1
    assert reported == ["kernel(...)"]
