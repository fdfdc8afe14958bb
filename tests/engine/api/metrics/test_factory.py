"""Metric factory: labelled children are cached and exported from their first lookup."""

from prometheus_client import CollectorRegistry
from trimtab_engine.api.metrics.factory import FamilyFactory

LABELS = {"model_name": "m", "engine": "0"}


def test_child_is_exported_from_first_lookup_and_cached() -> None:
    registry = CollectorRegistry()
    blocks = FamilyFactory(registry, "m", "0", {}).labelled_gauge("blocks", "KV blocks", "state")
    assert registry.get_sample_value("blocks", LABELS | {"state": "used"}) is None
    used = blocks.of("used")
    assert registry.get_sample_value("blocks", LABELS | {"state": "used"}) == 0
    used.set(7)
    assert blocks.of("used") is used
    assert registry.get_sample_value("blocks", LABELS | {"state": "used"}) == 7


def test_children_differ_by_every_label() -> None:
    registry = CollectorRegistry()
    preempted = FamilyFactory(registry, "m", "0", {}).labelled_counter("preempted", "Requests", "mode", "reason")
    preempted.of("swap", "capacity").inc(2)
    preempted.of("swap", "resize").inc(3)
    for reason, count in (("capacity", 2), ("resize", 3)):
        labels = LABELS | {"mode": "swap", "reason": reason}
        assert registry.get_sample_value("preempted_total", labels) == count


def test_values_observed_together_fall_into_right_buckets() -> None:
    registry, values = CollectorRegistry(), [0.05, 0.1, 0.100001, 7.0, 0.3]
    families = FamilyFactory(registry, "m", "0", {})
    one_by_one, together = (families.histogram(name, "Seconds", (0.1, 0.5)) for name in ("each", "all"))
    for value in values:
        one_by_one.observe(value)
    together.observe_all(values)
    for bound, count in (("0.1", 2), ("0.5", 4), ("+Inf", 5)):
        for name in ("each", "all"):
            assert registry.get_sample_value(f"{name}_bucket", LABELS | {"le": bound}) == count
    assert registry.get_sample_value("all_sum", LABELS) == sum(values)
