import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError
from gradwire.schedule import learning_rate

RUN = {"rounds": 20, "peak": 3e-3, "warmup_rounds": 2.0, "final_fraction": 0.1}


def test_warmup_rises_by_a_twentieth_of_the_peak_per_inner_step() -> None:
    rates = [learning_rate(round_ + (i + 1) / 10, **RUN) for round_ in range(2) for i in range(10)]

    assert rates == pytest.approx([3e-3 * (step + 1) / 20 for step in range(20)], rel=1e-12)


def test_cosine_runs_from_the_peak_through_the_middle_to_the_final_fraction() -> None:
    assert learning_rate(2, **RUN) == 3e-3
    assert learning_rate(11, **RUN) == pytest.approx(3e-3 * 0.55, rel=1e-12)
    assert learning_rate(20, **RUN) == pytest.approx(3e-4, rel=1e-12)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(6.5, **RUN) == pytest.approx(3e-3 * (0.1 + 0.9 * quarter), rel=1e-12)


def test_rate_stays_at_its_end_after_the_last_round() -> None:
    assert learning_rate(25, **RUN) == learning_rate(20, **RUN)


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, rounds=5, peak=1.0, warmup_rounds=0, final_fraction=0) == 1.0


@given(st.floats(0, 20), st.floats(0, 20))
def test_rate_falls_after_the_warmup_and_never_leaves_its_bounds(one: float, other: float) -> None:
    early, late = sorted((one, other))
    before, after = learning_rate(early, **RUN), learning_rate(late, **RUN)

    assert 0 <= before <= 3e-3
    if early >= 2:
        assert after <= before
    if late <= 2:
        assert before <= after


@pytest.mark.parametrize(
    ("change", "key"),
    [({"warmup_rounds": 20.0}, "warmup_rounds"), ({"warmup_rounds": -1.0}, "warmup_rounds")]
    + [({"final_fraction": value}, "final_fraction") for value in (-0.1, 1.1, math.nan)],
)
def test_setting_out_of_range_is_named(change: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = {change[key]}"):
        learning_rate(1, **(RUN | change))
