"""Selection of the kernel backends of a process: the defaults, or the environment variable's."""

import pytest
from trimtab_kernels.launch.backends import KernelBackends, kernel_backends, override_backends, parse


def test_parse_empty_text_is_default_and_none_disables_all() -> None:
    assert parse("") == KernelBackends(gluon_prefill=True, gluon_float8=True, dependent_launches=False)
    assert parse("none") == KernelBackends(gluon_prefill=False, gluon_float8=False, dependent_launches=False)


def test_parse_accepts_comma_separated_names() -> None:
    assert parse("gluon-prefill") == KernelBackends(gluon_prefill=True)
    assert parse("dependent-launches, gluon-prefill,") == KernelBackends(gluon_prefill=True, dependent_launches=True)


def test_parse_rejects_unknown_name_and_lists_valid_ones() -> None:
    message = r"TRIMTAB_KERNEL_BACKENDS: unknown backend \(gluon\); use gluon-prefill, gluon-float8, dep"
    with pytest.raises(ValueError, match=message):
        parse("gluon")
    with pytest.raises(ValueError, match=r"unknown backend \(none\)"):
        parse("none, gluon-prefill")


def test_override_backends_nests_and_restores() -> None:
    before = kernel_backends()
    with override_backends(KernelBackends(gluon_prefill=True)):
        with override_backends(KernelBackends(dependent_launches=True)):
            assert kernel_backends() == KernelBackends(dependent_launches=True)
        assert kernel_backends() == KernelBackends(gluon_prefill=True)
    assert kernel_backends() == before
