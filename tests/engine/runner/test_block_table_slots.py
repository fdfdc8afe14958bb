"""Block table slots: a table keeps its slot while it is read, and loses it only to one that needs it."""

import random

import numpy as np
from trimtab_engine.runner.block_table_slots import BlockTableSlots, TableUpdate


def test_only_new_blocks_are_sent() -> None:
    table_slots = BlockTableSlots(2)
    one, two = [5, 6, 7], [8]
    own, news = table_slots.table_slot([one, two], np.array([2, 1]))
    assert news == [TableUpdate(0, own[0], 0, 2), TableUpdate(1, own[1], 0, 1)]
    two.append(9)
    again, news = table_slots.table_slot([two, one], np.array([2, 3]))
    assert again.tolist() == [own[1], own[0]]
    assert news == [TableUpdate(0, own[1], 1, 2), TableUpdate(1, own[0], 2, 3)]
    assert table_slots.table_slot([two, one], np.array([1, 3]))[1] == []


def test_an_equal_list_is_another_table() -> None:
    table_slots = BlockTableSlots(2)
    table_slots.table_slot([[4, 5]], np.array([2]))
    assert [new.first for new in table_slots.table_slot([[4, 5]], np.array([2]))[1]] == [0]


def test_recently_read_table_keeps_its_slot() -> None:
    table_slots = BlockTableSlots(8)
    tables = [[number] for number in range(9)]
    ones = np.ones(8, np.int64)
    table_slots.table_slot(tables[:8], ones)
    table_slots.table_slot(tables[1:8], ones[:7])
    _, news = table_slots.table_slot([tables[8]], ones[:1])
    assert len(news) == 1
    assert table_slots.table_slot(tables[1:], ones)[1] == []
    assert len(table_slots.table_slot(tables[:1], ones[:1])[1]) == 1


def test_tables_of_a_step_have_distinct_slots() -> None:
    dice = random.Random(3)
    table_slots = BlockTableSlots(5)
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
        found, news = table_slots.table_slot(own, np.array(counts, np.int64))
        assert len(set(found.tolist())) == len(step)
        for new in news:
            rows[new.table_slot][new.first :] = own[new.place][new.first : new.last]
        assert [rows[table_slot][:count] for table_slot, count in zip(found.tolist(), counts, strict=True)] == own
