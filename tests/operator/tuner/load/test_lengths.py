"""Lengths by cohort: long unfinished outputs count, and a shift of the mix is detected once."""

import random
from dataclasses import replace

from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.load.lengths import Lengths, Survival
from trimtab_operator.tuner.samples import Finished, Unfinished


def finished(at: float, prompt: int, output: int, *, gap: float = 0.05, reason: str = "stop") -> Finished:
    return Finished(at, at + gap * output, prompt, output, 0.1, gap * (output - 1), reason=reason)


def test_survival_is_that_of_kaplan_and_meier() -> None:
    survival = Survival.of([1, 3, 5], [2, 4])
    assert survival.lengths == (1, 3, 5)
    assert [round(share, 4) for share in survival.shares] == [0.8, 0.5333, 0.0]
    assert survival.sample_longer_than(3, 0.5) == 5
    assert survival.mean == 5.0
    assert survival.sample_longer_than(9, 0.5) == 13  # the median remaining length is ln 2 of the mean


def test_survival_beyond_longest_output_uses_mean_hazard() -> None:
    survival = Survival.of([10], [100] * 9)
    draws = Draws(1)
    lengths = [survival.sample_longer_than(0, draws.share()) for _ in range(4000)]
    assert 0.08 < sum(length == 10 for length in lengths) / 4000 < 0.12
    assert 700 < sum(lengths) / 4000 < 1000  # 910 tokens per finished output


def test_cohort_mean_is_unbiased_during_a_ramp() -> None:
    rng = random.Random(5)
    true = 400.0
    now, rows, running = 600.0, [], []
    for i in range(6000):
        at = 600.0 * (i / 6000) ** 0.3  # rising rate
        output = max(1, int(rng.expovariate(1 / true)))
        if at + 0.2 * output <= now:
            rows.append(finished(at, 100, output, gap=0.2))
        else:
            running.append(Unfinished(at, 100, int((now - at) / 0.2)))
    lengths = Lengths().with_requests(rows, running)
    by_finish = sum(row.output_tokens for row in rows[-800:]) / 800
    cohort = lengths.sample(now)
    mean = sum(pair.output for pair in cohort) / len(cohort)
    assert by_finish < 0.75 * true
    assert abs(mean - true) < 0.12 * true


def test_aborted_and_empty_requests_are_ignored() -> None:
    rows = [finished(1.0, 10, 10, reason="abort"), finished(2.0, 10, 0), finished(3.0, 10, 10)]
    assert len(Lengths().with_requests(rows, ()).pairs) == 1


def shifted(prompt: int, *, change: float) -> Lengths:
    rng = random.Random(9)
    lengths = Lengths()
    for tick in range(80):
        now = 15.0 * (tick + 1)
        size = prompt if now < 600 else prompt * change
        rows = [finished(now - rng.uniform(0, 15), int(rng.uniform(0.5, 1.5) * size), 20) for _ in range(60)]
        lengths = lengths.with_requests(rows, ()).with_shift_check(now)
    return lengths


def test_a_shift_of_the_mix_begins_one_new_epoch() -> None:
    lengths = shifted(1000, change=2.0)
    assert lengths.version in (1, 2)
    mean = sum(pair.prompt for pair in lengths.sample(1200.0)) / len(lengths.sample(1200.0))
    assert 1850 < mean < 2150


def test_a_steady_mix_never_shifts() -> None:
    assert shifted(1000, change=1.0).version == 0


def simulate_outputs(
    rate: float, means: list[tuple[float, float]], until: float, *, seed: int = 4, gone: tuple[float, float] = (0, 0)
) -> tuple[Lengths, float]:
    """Return the lengths and the time of the last detected shift (0.0 for none) for outputs at 40 tokens a second whose
    mean changes at given times, sampled every 15 s. `gone`: time, and share of requests in flight that are lost with
    their replicas.
    """
    rng = random.Random(seed)
    lengths, told, at, shifted_at = Lengths(), 0.0, 0.0, 0.0
    came: list[tuple[float, int]] = []
    now = 15.0
    while now <= until:
        lost: list[tuple[float, int]] = []
        if now == gone[0]:
            lost = [(a, o) for a, o in came if a + o / 40 > told and rng.random() < gone[1]]
            came = [request for request in came if request not in lost]
        while (at := at + rng.expovariate(rate)) < now:
            mean = next(mean for begin, mean in reversed(means) if begin <= at)
            came.append((at, max(1, int(mean * rng.lognormvariate(-0.32, 0.8)))))
        ended = [(a, o) for a, o in came if told < a + o / 40 <= now]
        going = [(a, o) for a, o in came if a + o / 40 > now]
        version = lengths.version
        lengths = lengths.with_requests(
            [finished(a, 500, o, gap=1 / 40) for a, o in ended],
            [Unfinished(a, 500, int(40 * (now - a))) for a, _ in going],
            [Unfinished(a, 500, int(40 * (told - a))) for a, _ in lost],
        ).with_shift_check(now)
        if lengths.version != version:
            shifted_at = now
        told, now = now, now + 15.0
    return lengths, shifted_at


def test_answers_that_grow_longer_are_seen_while_they_run() -> None:
    lengths, shifted_at = simulate_outputs(5.0, [(0.0, 1600.0), (1200.0, 3400.0)], 1275.0)
    assert 1200.0 < shifted_at <= 1275.0  # a mean output takes 85 s
    mean = sum(pair.output for pair in lengths.sample(1275.0)) / len(lengths.sample(1275.0))
    assert mean > 2200


def test_long_and_uneven_answers_that_stay_so_are_no_shift() -> None:
    for seed in range(3):
        assert simulate_outputs(5.0, [(0.0, 1600.0)], 1800.0, seed=seed)[1] == 0.0


def test_lost_requests_count_as_censored_lengths() -> None:
    """A third of the replicas is removed during long outputs; their short ones had ended."""
    lengths, shifted_at = simulate_outputs(5.0, [(0.0, 1600.0)], 330.0, seed=0, gone=(300.0, 0.33))
    forgotten = replace(lengths, lost=())
    assert len(lengths.lost) > 50
    assert shifted_at == 0.0
    mean, too_short = (
        sum(pair.output for pair in known.sample(330.0)) / len(known.sample(330.0)) for known in (lengths, forgotten)
    )
    assert abs(mean - 1600) < 0.1 * 1600
    assert too_short < 0.95 * mean


def test_small_sample_is_not_biased_to_short_outputs() -> None:
    """Half of the last minute's requests are unfinished, and they are the long ones."""
    lengths = replace(simulate_outputs(5.0, [(0.0, 1600.0)], 600.0, seed=0)[0], epoch=590.0)
    known = lengths.sample(600.0)
    ended = lengths.pairs[-len(known) :]
    assert len(known) >= 290
    assert sum(pair.output for pair in ended) / len(ended) < 0.8 * 1600
    assert abs(sum(pair.output for pair in known) / len(known) - 1600) < 0.15 * 1600


def test_lost_requests_count_as_arrivals() -> None:
    """Otherwise a minute without them would look like a burst after a lull."""
    times = [0.5 * index for index in range(1200)]
    known = came(times[:600])
    lost = known.with_requests((), (), [Unfinished(at, 100, 5) for at in times[600:]])
    assert lost.dispersion(600.0) == 1.0


def test_draws_are_the_same_each_time_and_even() -> None:
    one, other = Draws(7), Draws(7)
    assert [one.share() for _ in range(5)] == [other.share() for _ in range(5)]
    for variation in (1.0, 2.0, 4.0):
        gaps = Draws(1).gaps(2000, variation=variation)
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert abs(mean - 1) < 1e-9
        assert 0.85 * variation < spread <= 1.05 * variation


def came(times: list[float]) -> Lengths:
    return Lengths().with_requests([finished(at, 100, 5) for at in times], ())


def test_dispersion_ignores_rate_changes_between_minutes() -> None:
    rng, at, times = random.Random(3), 0.0, []
    while at < 600.0:
        at += rng.expovariate(30.0 if at % 300 < 60 else 3.0)
        times.append(at)
    assert came(times).dispersion(600.0) < 2.0


def test_dispersion_of_clustered_arrivals_is_high() -> None:
    rng, at, times = random.Random(3), 0.0, []
    while at < 600.0:
        at += rng.expovariate(1.0)
        times += [at + 0.01 * i for i in range(9)]
    assert 6.0 < came(times).dispersion(600.0) < 13.0


def test_dispersion_ignores_bins_before_first_arrival() -> None:
    rng, at, times = random.Random(3), 0.0, []
    while at < 60.0:
        at += rng.expovariate(30.0)
        times.append(at)
    assert came(times).dispersion(60.0) < 1.6


def test_dispersion_of_few_requests_is_one() -> None:
    assert came([1.0, 1.1, 1.2] * 5).dispersion(600.0) == 1.0


def test_sample_includes_youngest_requests_if_few_are_known() -> None:
    rows = [finished(float(at), 100, 5) for at in range(1, 60)]
    running = [Unfinished(58.0, 900, 1)] * 10
    lengths = Lengths().with_requests(rows, running)
    assert len(lengths.sample(60.0)) == 69
    many = Lengths().with_requests([finished(at / 10, 100, 5) for at in range(6000)], [Unfinished(598.0, 900, 1)] * 10)
    assert max(pair.arrived_at for pair in many.sample(600.0)) <= 555.0
