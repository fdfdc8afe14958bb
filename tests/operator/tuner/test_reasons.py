"""docs/guides/tuning.md lists every reason of status, Events and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.moves import Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.settings import Mode

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "tuning.md"
FIRST_CELLS = re.compile(r"^\| (`[A-Z][^|]*) \|", re.MULTILINE)
NAMES = re.compile(r"`([A-Z][a-zA-Z]+)`")


class AnyNumber(dict[str, float]):
    """Evidence with every number."""

    def __missing__(self, _: str) -> float:
        return 1.0


def test_tuning_page_lists_every_reason() -> None:
    listed = {name for cell in FIRST_CELLS.findall(PAGE.read_text()) for name in NAMES.findall(cell)}
    assert listed == {reason.value for reason in Reason}


def test_every_decision_reason_has_a_sentence() -> None:
    of_conditions = {
        *(reason for reason in Reason if reason.value.startswith("Metrics")),
        Reason.SCRAPED, Reason.NO_READY_REPLICA, Reason.PROMETHEUS_UNAVAILABLE,
        Reason.TUNING, Reason.RECOMMENDING, Reason.OFF, Reason.CRASH_BUDGET_EXHAUSTED, Reason.NOT_YET_APPLIED,
    }  # fmt: skip
    for reason in set(Reason) - of_conditions:
        assert sentence_of(Move(reason, Parameter.MAX_NUM_SEQS, 8, 9, AnyNumber()), Mode.AUTO).endswith(".")
