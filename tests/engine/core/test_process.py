"""What the core's process says of an admin call."""

from trimtab_engine.core.process import what_changed


def test_a_change_is_told_by_what_has_another_value() -> None:
    before = {"max_num_seqs": 32, "gpu_memory_utilization": 0.9, "swap_space": 0}
    after = before | {"max_num_seqs": 9, "gpu_memory_utilization": 0.75}
    assert what_changed(before, after) == "max_num_seqs 32 → 9, gpu_memory_utilization 0.9 → 0.75"


def test_a_change_to_the_same_values_is_told_as_that() -> None:
    assert what_changed({"max_num_seqs": 32}, {"max_num_seqs": 32}) == "the same values"
