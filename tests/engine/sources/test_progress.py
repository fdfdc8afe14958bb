"""Text of a download's progress."""

import pytest
from trimtab_engine.sources.progress import RATE_SECONDS, Downloaded, Meter, Progress

GB = 10**9


def test_the_sentence_has_share_sizes_and_time_left() -> None:
    progress = Progress("hf://a/b", 12 * GB, 28 * GB, rate=GB / 8)
    assert progress.sentence == "Downloading 43 %, 12.0 GB of 28.0 GB, 2 min left"


@pytest.mark.parametrize(
    ("rate", "left"), [(GB, "10 s left"), (GB / 60, "10 min left"), (GB / 3600, "10.0 h left"), (None, "20.0 GB")]
)
def test_time_left_is_said_in_its_unit_or_not_at_all(rate: float | None, left: str) -> None:
    assert Progress("m", 10 * GB, 20 * GB, rate).sentence.endswith(left)


def test_small_models_are_counted_in_megabytes() -> None:
    assert Progress("m", 5 * 10**6, 10**7).sentence == "Downloading 50 %, 5 MB of 10 MB"


def test_before_sizes_are_known_the_hub_is_asked() -> None:
    assert Progress("hf://a/b", 0, 0).sentence == "Asking for hf://a/b"


def test_waiting_process_reports_progress() -> None:
    assert Progress("m", GB, 2 * GB, elsewhere=True).sentence.startswith("Another engine downloads it: 50 %")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = Meter("m", 1000, 0, now=0.0)
    meter.note(100)
    assert meter.read(1.0).rate is None  # too soon
    assert meter.read(10.0).rate == 10.0
    stalled = [meter.read(10.0 + second).rate for second in range(1, int(RATE_SECONDS) + 11)]
    assert stalled[0] is not None
    assert stalled[-1] is None


def test_existing_bytes_do_not_count_for_the_rate() -> None:
    meter = Meter("m", 1000, 900, now=0.0)
    assert meter.read(10.0) == Progress("m", 900, 1000, begun_bytes=900)


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "said"), [(28 * GB, 240.0, "28.0 GB in 4 min"), (3 * 10**6, 0.2, "3 MB in 0 s")]
)
def test_progress_is_reported_with_time(num_bytes: int, seconds: float, said: str) -> None:
    assert Downloaded(num_bytes, seconds).sentence == f"Downloaded {said}"


def test_bytes_that_were_thrown_away_are_not_here() -> None:
    meter = Meter("m", 100, 0, now=0.0)
    meter.note(60)
    meter.note(-60)
    assert meter.read(1.0).percent == 0.0
