"""Ways that no GPU has judged are asked for by name."""

import pytest
from trimtab_kernels.launch.switches import Ways, parse, taking, ways


def test_none_is_taken_that_nobody_asked_for() -> None:
    assert parse("") == Ways(gluon_prefill=False, gluon_float8=False, dependent_launches=False)


def test_names_are_separated_by_commas() -> None:
    assert parse("gluon-prefill") == Ways(gluon_prefill=True)
    assert parse("dependent-launches, gluon-prefill,") == Ways(gluon_prefill=True, dependent_launches=True)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="TRIMTAB_GPU_WAYS names gluon; there are gluon-prefill, gluon-float8, dep"):
        parse("gluon")


def test_a_block_takes_its_own_and_leaves_the_others_behind_it() -> None:
    before = ways()
    with taking(Ways(gluon_prefill=True)):
        with taking(Ways(dependent_launches=True)):
            assert ways() == Ways(dependent_launches=True)
        assert ways() == Ways(gluon_prefill=True)
    assert ways() == before
