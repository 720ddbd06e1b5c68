"""The picture of a plan: complete where it is small, honest where it is cut, safe to show anywhere."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from raggedright import Layout, Plan, Rows, make_plan
from raggedright.report.plan_svg import MAX_SESSIONS, draw_plan

SVG = "{http://www.w3.org/2000/svg}"


def _rows(*, prompts: int, sessions: int, most: int = 1, mean: int = 400, seed: int = 0) -> Rows:
    """`sessions` sessions a prompt, each with 1 to `most` rows."""
    rng = np.random.default_rng(seed)
    names = [(p, s, t) for p in range(prompts) for s in range(sessions) for t in range(rng.integers(1, most + 1))]
    prompt, session, trajectory = zip(*names, strict=True) if names else ((), (), ())
    tokens = rng.integers(mean // 2, 2 * mean, len(names))
    return Rows.from_columns(
        prompt=[f"p{i:05}" for i in prompt],
        session=session,
        trajectory=trajectory,
        prompt_tokens=np.full(len(names), 10),
        response_tokens=tokens,
    )


def _small_plan() -> Plan:
    """Three prompts; one step has three rows that share no micro-batch, so that one padding row fills the fourth."""
    tokens = {"a": [[300, 500], [200], [400, 100, 250]], "b": [[900], [800], [950]], "c": [[350], [150, 450], [600]]}
    return make_plan(
        Rows.from_records(
            {"prompt": prompt, "session": s, "trajectory": t, "prompt_tokens": 50, "response_tokens": count - 50}
            for prompt, sessions in tokens.items()
            for s, session in enumerate(sessions)
            for t, count in enumerate(session)
        ),
        Layout(dp_size=2, batch_size=3, mini_batch_size=1, rollout_n=3, micro_batch_tokens=1000),
    )


PLANS = {
    "no rows": make_plan(_rows(prompts=0, sessions=0), Layout(dp_size=2, batch_size=4, mini_batch_size=2)),
    "no rows, lcm": make_plan(
        _rows(prompts=0, sessions=0), Layout(dp_size=2, batch_size=4, mini_batch_size=2, align="lcm")
    ),
    "one row": make_plan(_rows(prompts=1, sessions=1), Layout(dp_size=3, batch_size=2, mini_batch_size=1)),
    "small": _small_plan(),
    "padded, two epochs, critic": make_plan(
        _rows(prompts=5, sessions=4, most=5),
        Layout(
            dp_size=4, batch_size=5, mini_batch_size=2, epochs=2, critic_mini_batch_size=5, collate="padded",
            micro_batch_tokens=3000,
        ),
    ),
    "lcm": make_plan(
        _rows(prompts=6, sessions=4, most=2),
        Layout(dp_size=2, batch_size=6, mini_batch_size=2, rollout_n=4, align="lcm", micro_batch_tokens=4000),
    ),
    "lcm, mostly padding": make_plan(
        _rows(prompts=2, sessions=2), Layout(dp_size=2, batch_size=64, mini_batch_size=64, rollout_n=8, align="lcm")
    ),
    "budget in rows": make_plan(
        _rows(prompts=4, sessions=4, most=3), Layout(dp_size=3, batch_size=4, mini_batch_size=2, micro_batch_rows=4)
    ),
    "over long, alone": make_plan(
        _rows(prompts=4, sessions=4),
        Layout(dp_size=2, batch_size=4, mini_batch_size=2, micro_batch_tokens=500, over_long="alone"),
    ),
    "over long, dropped": make_plan(
        _rows(prompts=4, sessions=4),
        Layout(dp_size=2, batch_size=4, mini_batch_size=2, micro_batch_tokens=500, over_long="drop"),
    ),
    "many ranks and steps": make_plan(
        _rows(prompts=320, sessions=8, most=3),
        Layout(dp_size=64, batch_size=320, mini_batch_size=20, rollout_n=8, micro_batch_tokens=1024),
    ),
    "many slots": make_plan(
        _rows(prompts=100, sessions=8), Layout(dp_size=2, batch_size=100, mini_batch_size=100, micro_batch_tokens=1024)
    ),
    "many thin rows": make_plan(
        _rows(prompts=300, sessions=8, most=3, mean=10),
        Layout(dp_size=2, batch_size=300, mini_batch_size=100, micro_batch_tokens=65_536),
    ),
}  # fmt: skip

any_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def _rects(picture: str, pattern: str) -> list[dict[str, str]]:
    """Attributes of the rectangles of a class, without the legend's."""
    rects = [r.attrib for r in ElementTree.fromstring(picture).iterfind(f".//{SVG}rect") if "x" in r.attrib]
    legend = max(float(r["y"]) for r in rects)
    return [r for r in rects if re.fullmatch(pattern, r["class"]) and float(r["y"]) != legend]


def _words(picture: str) -> str:
    return "\n".join(e.text or "" for e in ElementTree.fromstring(picture).iterfind(f".//{SVG}text"))


@any_plan
def test_every_role_of_any_plan_is_a_well_formed_picture_within_its_page(plan: Plan):
    for role in plan.roles:
        picture = draw_plan(plan, role=role)
        assert len(picture) < 400_000
        root = ElementTree.fromstring(picture)
        left, top, width, height = map(float, root.attrib["viewBox"].split())
        assert (left, top) == (0, 0)
        assert root.findtext(f"{SVG}title")
        assert "padding rows" in root.findtext(f"{SVG}desc", "")
        for rect in (r.attrib for r in root.iterfind(f".//{SVG}rect") if "x" in r.attrib):
            x, y, w, h = (float(rect[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x < x + w <= width, rect
            assert 0 <= y < y + h <= height, rect


@any_plan
def test_picture_needs_nothing_from_outside_and_knows_the_dark(plan: Plan):
    picture = draw_plan(plan)
    assert "prefers-color-scheme:dark" in picture
    assert picture.count("http") == 1  # the namespace
    for foreign in ("<script", "<image", "href", "@import", "@font-face"):
        assert foreign not in picture


def test_every_row_is_a_bar_on_both_sides_and_every_padding_row_a_hatched_one():
    plan = _small_plan()
    picture = draw_plan(plan)
    assert plan.num_padding_rows == 1
    assert len(_rects(picture, r"p\d")) == 2 * len(plan.rows)
    assert len(_rects(picture, "padding")) == 1
    assert len(_rects(picture, "cell")) == sum(step.num_micro_batches for step in plan.steps("actor"))
    assert len(_rects(picture, "panel")) == 3


def test_bars_are_as_wide_as_their_tokens():
    plan = _small_plan()
    bars = _rects(draw_plan(plan), r"p\d")
    for side in (bars[: len(plan.rows)], bars[len(plan.rows) :]):
        widths = np.array(sorted(float(bar["width"]) + 1 for bar in side))  # a pixel parts neighbours
        tokens = np.sort(plan.rows.tokens)
        np.testing.assert_allclose(widths / widths.sum(), tokens / tokens.sum(), atol=0.002)


def test_captions_count_rows_sessions_and_padding():
    words = _words(draw_plan(_small_plan()))
    assert "13 rows of 9 sessions, 3 prompts" in words
    assert "3 steps on 2 ranks" in words
    assert "3 rows, 1 padding row" in words


def test_a_large_plan_stays_small_and_says_what_it_leaves_out():
    rows = _rows(prompts=2048, sessions=8, most=3)
    assert len(rows) > 32_000
    layout = Layout(dp_size=64, batch_size=2048, mini_batch_size=128, rollout_n=8, micro_batch_tokens=1024)
    picture = draw_plan(make_plan(rows, layout))
    words = _words(picture)
    assert len(picture) < 200_000
    assert f"+ {2048 * 8 - MAX_SESSIONS:,} more sessions" in words
    assert "+ 60 more ranks" in words
    assert "+ 12 more steps" in words


def test_slots_beyond_the_page_are_counted():
    plan = PLANS["many slots"]
    hidden = plan.steps("actor")[0].num_slots - 12
    assert f"+ {hidden:,} more micro-batches per rank" in _words(draw_plan(plan))


def test_names_from_outside_are_text_and_never_markup():
    names = ['<a>&"', "x\x00\ud800", "</text>"]
    rows = Rows.from_columns(
        prompt=names, session=[0] * 3, trajectory=[0] * 3, prompt_tokens=[5] * 3, response_tokens=[5] * 3
    )
    picture = draw_plan(make_plan(rows, Layout(dp_size=1, batch_size=3, mini_batch_size=3)))
    assert picture.encode("utf-8")
    assert {'<a>&"', "x??", "</text>"} <= set(_words(picture).split("\n"))


def test_a_skipped_step_is_marked():
    rows = Rows.from_columns(
        prompt=["a", "b"], session=[0, 0], trajectory=[0, 0], prompt_tokens=[5, 5], response_tokens=[5, 5],
        loss_tokens=[5, 0],
    )  # fmt: skip
    picture = draw_plan(make_plan(rows, Layout(dp_size=1, batch_size=2, mini_batch_size=1)))
    assert _words(picture).count("skipped: no loss token") == 1
    assert picture.count('<g class="skipped">') == 1


def test_dropped_rows_are_drawn_among_the_sessions_alone():
    plan = PLANS["over long, dropped"]
    picture = draw_plan(plan)
    assert len(_rects(picture, "dropped")) == len(plan.dropped) > 0
    assert len(_rects(picture, r"p\d")) == 2 * (len(plan.rows) - len(plan.dropped))
    assert f"{len(plan.dropped)} rows dropped (dashed)" in _words(picture)


@any_plan
def test_same_picture_for_every_order_of_the_rows(plan: Plan):
    order = np.random.default_rng(1).permutation(len(plan.rows))
    assert draw_plan(make_plan(plan.rows.take(order), plan.layout)) == draw_plan(plan)
