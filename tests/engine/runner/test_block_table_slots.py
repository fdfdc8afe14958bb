"""Who knows which block tables: a table keeps its seat while it is read, and loses it only to one that needs it."""

import random

import numpy as np
from trimtab_engine.runner.block_table_slots import New, Seats


def test_only_what_came_after_the_last_step_is_told() -> None:
    seats = Seats(2)
    one, two = [5, 6, 7], [8]
    own, news = seats.seat([one, two], np.array([2, 1]))
    assert news == [New(0, own[0], 0, 2), New(1, own[1], 0, 1)]
    two.append(9)
    again, news = seats.seat([two, one], np.array([2, 3]))
    assert again.tolist() == [own[1], own[0]]
    assert news == [New(0, own[1], 1, 2), New(1, own[0], 2, 3)]
    assert seats.seat([two, one], np.array([1, 3]))[1] == []


def test_an_equal_list_is_another_table() -> None:
    seats = Seats(2)
    seats.seat([[4, 5]], np.array([2]))
    assert [new.first for new in seats.seat([[4, 5]], np.array([2]))[1]] == [0]


def test_who_was_read_last_keeps_its_seat() -> None:
    seats = Seats(8)
    tables = [[number] for number in range(9)]
    ones = np.ones(8, np.int64)
    seats.seat(tables[:8], ones)
    seats.seat(tables[1:8], ones[:7])
    _, news = seats.seat([tables[8]], ones[:1])
    assert len(news) == 1
    assert seats.seat(tables[1:], ones)[1] == []
    assert len(seats.seat(tables[:1], ones[:1])[1]) == 1


def test_no_step_gives_two_tables_one_seat() -> None:
    dice = random.Random(3)
    seats = Seats(5)
    rows: list[list[int]] = [[] for _ in range(5)]
    tables: list[list[int]] = [[] for _ in range(12)]
    for _ in range(500):
        step = dice.sample(range(12), dice.randint(0, 5))
        for number in step:
            if dice.random() < 0.1:
                tables[number] = tables[number][: dice.randint(0, len(tables[number]))]
            tables[number].append(dice.randrange(100))
        own = [tables[number] for number in step]
        counts = [len(table) for table in own]
        found, news = seats.seat(own, np.array(counts, np.int64))
        assert len(set(found.tolist())) == len(step)
        for new in news:
            rows[new.seat][new.first :] = own[new.place][new.first : new.last]
        assert [rows[seat][:count] for seat, count in zip(found.tolist(), counts, strict=True)] == own
