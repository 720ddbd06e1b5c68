"""The charts of a run: right for one round, none, gaps and constants, and small for any number of rounds."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from raggedright.report.charts import (
    Dots,
    Frame,
    Line,
    bucketed,
    line_chart,
    numbers,
    scale_of,
    stacked_chart,
    tick_text,
)
from raggedright.report.text import duration, number, share, signed


def frame(rounds: int, **more) -> Frame:
    return Frame(title="a chart", rounds=np.arange(1, rounds + 1), **more)


def drawn(svg: str) -> ElementTree.Element:
    """The chart as XML; nothing in it is not a number."""
    assert not re.search(r"\b(nan|inf)\b", svg)
    return ElementTree.fromstring(svg)


def paths(svg: str, name: str) -> list[str]:
    return [path.get("d", "") for path in drawn(svg).iter("path") if name in path.get("class", "").split()]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [math.nan],
        [1.0] * 5,
        [0.0] * 5,
        [-3.0, math.nan, 4.0],
        [math.nan] * 3,
        [1e290, -1e290],
        [1e-12, 2e-12],
        [1e12, 1e12 + 1],
        [5e-324, 0],
    ],
)
@pytest.mark.parametrize(
    "chart",
    [
        lambda f, v: line_chart(f, [Line("x", v), Line("y", v, style=1)]),
        lambda f, v: stacked_chart(f, [Line("x", np.abs(v))]),
        lambda f, v: stacked_chart(f, [Line("x", np.abs(v)), Line("y", np.abs(v))]),
    ],
)
def test_any_series_makes_a_chart(chart, values):
    svg = drawn(chart(frame(len(values)), numbers(values)))
    assert svg.get("role") == "img"
    assert svg.get("aria-label", "").startswith("a chart, rounds")
    ticks = [text.text for text in svg.iter("text") if text.get("class") == "y"]
    assert len(ticks) >= 2
    assert len(set(ticks)) == len(ticks)


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot():
    svg = line_chart(frame(7), [Line("x", numbers([1, 2, None, 3, None, 4, 5]))])
    assert paths(svg, "line")[0].count("M") == 3
    assert len(list(drawn(svg).iter("circle"))) == 1


def test_a_single_round_is_a_dot_in_the_middle_with_its_round():
    svg = drawn(line_chart(frame(1), [Line("x", numbers([0.25]), low=numbers([0.1]), high=numbers([0.4]))]))
    assert [circle.get("cx") for circle in svg.iter("circle")] == ["50.00%"]
    assert [text.text for text in svg.iter("text") if text.get("class") == "x"] == ["round 1"]
    assert next(path.get("class") for path in svg.iter("path")) == "band c0"


def test_no_rounds_say_so():
    assert "no numbers yet" in line_chart(frame(0), [Line("x", numbers([]))])


def test_a_constant_series_stands_inside_its_scale():
    for value in (0.0, 5.0, -1e-9, 1e12):
        scale = scale_of(value, value)
        assert scale.low < value < scale.high


def test_scales_end_on_round_ticks_and_hold_the_data():
    rng = np.random.default_rng(0)
    for low, high in np.sort(rng.normal(size=(200, 2)) * 10.0 ** rng.integers(-12, 12, (200, 1)), axis=1).tolist():
        for most in (2, 4, 5):
            scale = scale_of(low, high, max_ticks=most)
            assert scale.low <= low
            assert scale.high >= high
            assert 2 <= len(scale.ticks) <= most + 3
            words = [tick_text(tick, scale.step) for tick in scale.ticks]
            assert len(set(words)) == len(words)
            assert all(len(word) <= 9 for word in words)


def test_a_hundred_thousand_rounds_stay_small_and_keep_their_spikes():
    values = np.sin(np.arange(100_000) / 9000)
    values[77_777] = 50.0
    svg = line_chart(frame(100_000), [Line("x", values)])
    assert len(svg) < 80_000
    assert "to 50)" in svg
    top = min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", paths(svg, "band")[0]))
    assert top < 40  # of 180: the spike is in the band


def test_buckets_hold_every_round_once_and_average_what_is_known():
    rounds = np.arange(1, 1001)
    values = np.where(rounds % 10 == 0, np.nan, rounds.astype(float))
    values[:200] = np.nan
    bucket = bucketed(rounds, values, 7)
    assert (bucket.first[0], bucket.last[-1]) == (1, 1000)
    assert (bucket.first[1:] == bucket.last[:-1] + 1).all()
    assert np.isnan(bucket.mean[0])
    for first, last, mean, low, high in zip(*bucket, strict=True):
        part = values[first - 1 : last]
        if not np.isnan(mean):
            assert (low, high) == (np.nanmin(part), np.nanmax(part))
            assert mean == pytest.approx(np.nanmean(part))


def test_evaluations_are_dots_at_their_rounds_even_before_the_first_round():
    dots = Dots("eval score", np.array([0, 10]), numbers([0.1, 0.9]), hollow=True)
    svg = drawn(line_chart(frame(10, dots=[dots]), [Line("score", np.linspace(0, 1, 10))]))
    assert [circle.get("cx") for circle in svg.iter("circle")] == ["0.00%", "100.00%"]
    assert [title.text for title in svg.iter("title")][-1] == "round 10: eval score 0.9"


def test_each_round_says_its_numbers_and_names_are_escaped():
    svg = line_chart(frame(2), [Line('<b>"&', numbers([1, 2])), Line("y", numbers([None, 3.5]), style=1)])
    titles = [title.text for title in drawn(svg).iter("title")]
    assert titles == ['round 1\n<b>"& 1\ny –', 'round 2\n<b>"& 2\ny 3.50']  # noqa: RUF001
    assert "<b>" not in svg


def test_lines_differ_without_their_colours():
    svg = line_chart(frame(3), [Line("a", np.arange(3.0)), Line("b", np.arange(3.0), style=1)])
    assert [path.get("class") for path in drawn(svg).iter("path")] == ["line l0", "line l1"]


def test_stacks_add_up():
    svg = stacked_chart(frame(3, height=100), [Line("a", numbers([1, 2, 3])), Line("b", numbers([9, None, 7]))])
    tops = [re.match(r"M0 ([\d.]+)L", path) for path in paths(svg, "stack")]
    assert [top and float(top[1]) for top in tops] == [90.0, 0.0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (number(0.12345), "0.123"),
        (number(-1234.5), "\N{MINUS SIGN}1,234"),
        (number(12.0), "12"),
        (number(math.inf), "∞"),
        (number(3.2e-7), "3.2e\N{MINUS SIGN}7"),
        (number(None), "\N{EN DASH}"),
        (number(math.nan), "\N{EN DASH}"),
        (signed(0.5), "+0.5"),
        (signed(-0.5), "\N{MINUS SIGN}0.5"),
        (share(0, 0), "0 %"),
        (share(1, 3), "33.3 %"),
        (share(99_999, 100_000), "99.99 %"),
        (share(1, 10**9), "< 0.01 %"),
        (share(5, 5), "100 %"),
        (duration(0.0123), "12.3 ms"),
        (duration(59.99), "60 s"),
        (duration(71.6), "1 min 12 s"),
        (duration(3700), "1 h 01 min"),
        (duration(2e5), "2 d 7 h"),
        (duration(None), "\N{EN DASH}"),
        (tick_text(0.003, 0.001), "0.003"),
        (tick_text(30_000, 10_000), "30k"),
        (tick_text(-0.1, 0.1), "\N{MINUS SIGN}0.1"),
    ],
)
def test_numbers_read_as_one_would_write_them(words, expected):
    assert words == expected


@pytest.mark.parametrize(
    ("low", "high"),
    [(10.7961, 10.79635), (0.00012, 0.0001204), (0, 1e-5), (-1e-7, 2e-7), (1e5, 1e5 + 0.4), (1e20, 1.001e20),
     (10.7961, 10.796100001), (0.5, 0.5004), (-3.00002, -3.0)],
)  # fmt: skip
def test_no_two_ticks_of_an_axis_read_the_same(low: float, high: float):
    """All ticks of an axis read 10.796."""
    scale = scale_of(low, high)
    texts = [tick_text(tick, scale.step) for tick in scale.ticks]
    assert len({*texts}) == len(texts)
    assert max(map(len, texts)) <= 10
