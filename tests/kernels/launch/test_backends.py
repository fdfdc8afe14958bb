"""Which ways of the kernels a process takes: those that a GPU has found right and faster, or what it names."""

import pytest
from trimtab_kernels.launch.switches import Ways, parse, taking, ways


def test_what_a_gpu_has_judged_is_the_default_and_none_turns_it_off() -> None:
    assert parse("") == Ways(gluon_prefill=True, gluon_float8=True, dependent_launches=False)
    assert parse("none") == Ways(gluon_prefill=False, gluon_float8=False, dependent_launches=False)


def test_names_are_separated_by_commas() -> None:
    assert parse("gluon-prefill") == Ways(gluon_prefill=True)
    assert parse("dependent-launches, gluon-prefill,") == Ways(gluon_prefill=True, dependent_launches=True)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="TRIMTAB_GPU_WAYS names gluon; there are gluon-prefill, gluon-float8, dep"):
        parse("gluon")
    with pytest.raises(ValueError, match="names none"):
        parse("none, gluon-prefill")


def test_a_block_takes_its_own_and_leaves_the_others_behind_it() -> None:
    before = ways()
    with taking(Ways(gluon_prefill=True)):
        with taking(Ways(dependent_launches=True)):
            assert ways() == Ways(dependent_launches=True)
        assert ways() == Ways(gluon_prefill=True)
    assert ways() == before
