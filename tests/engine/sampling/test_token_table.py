"""Rows of counts and biases: written when assigned, updated by sampled tokens, reclaimed from the least needy
requests.
"""

import pytest
import torch
from engine_builders import a_request
from trimtab_engine.sampling import token_table
from trimtab_engine.sampling.token_table import DeviceRow, TokenTable, biases_of, counts_of
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.sampling import token_mask

CPU = torch.device("cpu")
VOCABULARY = 10


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> TokenTable:
    """A table of three rows."""
    monkeypatch.setattr(token_table, "TABLE_BYTES", 3 * 4 * 12)
    return TokenTable(VOCABULARY, 8, CPU)


def penalised(*output: int) -> Request:
    return a_request(output=output, presence_penalty=1.0)


def counts(table: TokenTable, request: Request) -> list[int]:
    places = table.assign_rows([DeviceRow(request)])[request]
    assert places.counts is not None
    return table.words[places.counts][:VOCABULARY].tolist()


def choose(table: TokenTable, row: DeviceRow, token: int) -> None:
    places = table.assign_rows([row])[row.request]
    assert places.counts is not None
    table.count([places], torch.tensor([places.counts]), torch.tensor([token]))


def test_counts_are_of_the_output_and_of_being_in_the_prompt() -> None:
    request = a_request((4, 4, 2), (2, 3, 3))
    assert counts_of(request, 6).tolist() == [0, 0, 3, 4, 1, 0]


def test_biases_add_up_and_forbid() -> None:
    inf = float("inf")
    assert biases_of(a_request(logit_bias={1: 2.5}).sampling, 4).tolist() == [0.0, 2.5, 0.0, 0.0]
    p = a_request(logit_bias={1: 2.5, 2: 1.0}, allowed_tokens=token_mask((0, 1))).sampling
    assert biases_of(p, 4).tolist() == [0.0, 2.5, -inf, -inf]


def test_plain_request_gets_no_rows(table: TokenTable) -> None:
    assert table.assign_rows([DeviceRow(a_request(temperature=0.5, logprobs=1))]) == {}


def test_a_chosen_token_is_counted_before_the_host_knows_it(table: TokenTable) -> None:
    request = penalised(3)
    choose(table, DeviceRow(request), 5)
    choose(table, DeviceRow(request, source=0), 5)
    request.token_ids += (5, 5)
    assert counts(table, request) == counts_of(request, VOCABULARY).tolist()


def test_tokens_that_were_chosen_elsewhere_are_counted_too(table: TokenTable) -> None:
    request = penalised(3)
    choose(table, DeviceRow(request), 5)
    request.token_ids += (5, 6, 7)  # for example, the last two by drafts
    assert counts(table, request) == counts_of(request, VOCABULARY).tolist()


def test_rows_of_requests_that_ended_are_lent_again(table: TokenTable) -> None:
    ended, kept, new = penalised(1), penalised(2), penalised(3)
    both = a_request(presence_penalty=1.0, logit_bias={1: 1.0})
    table.assign_rows([DeviceRow(ended), DeviceRow(kept)])
    ended.status = RequestStatus.FINISHED_LENGTH
    place = table.assign_rows([DeviceRow(kept)])[kept].counts
    table.assign_rows([DeviceRow(new), DeviceRow(penalised(4))])
    assert table.assign_rows([DeviceRow(kept)])[kept].counts == place, (
        "one that lives keeps its row while there are others"
    )
    assert table.has_room_for([both, kept])
    assert set(table.assign_rows([DeviceRow(both), DeviceRow(kept)])) == {both, kept}


def test_a_request_that_lost_its_row_gets_it_as_it_would_be(table: TokenTable) -> None:
    lost = penalised(1)
    choose(table, DeviceRow(lost), 5)
    others = [penalised(number) for number in range(3)]
    table.assign_rows([DeviceRow(other) for other in others])
    lost.token_ids.append(5)
    assert counts(table, lost) == counts_of(lost, VOCABULARY).tolist()


def test_more_than_there_are_rows_is_no_step_of_the_device(table: TokenTable) -> None:
    requests = [penalised(number) for number in range(4)]
    assert table.has_room_for(requests[:3])
    assert not table.has_room_for(requests)
