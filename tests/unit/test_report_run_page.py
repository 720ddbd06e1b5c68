"""The page of a run: all of it is there, nothing from outside is more than text, and it asks for nothing."""

import argparse
import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from raggedright.cli import report_command as command
from raggedright.report.events import (
    EventLog,
    EventsError,
    SampledSession,
    SampledTrajectory,
    SamplesEvent,
    read_events,
)
from raggedright.report.run_numbers import headline
from raggedright.report.run_page import shade, shown_samples, write_report
from raggedright.report.text import visible
from unit.made_runs import CONFIG, HOSTILE, START, event, made_round, write_hostile_run, write_run

_PAGE_TAGS = "html head meta title style body header footer main nav section article h1 h2 h3 p a b i span div br"
_LIST_TAGS = "dl dt dd figure figcaption table caption thead tbody tr th td"
_PICTURE_TAGS = "svg g defs pattern rect path line circle text desc"
TAGS = {tag for tags in (_PAGE_TAGS, _LIST_TAGS, _PICTURE_TAGS) for tag in tags.split()}


class Page(HTMLParser):
    """What a browser would make of the page: tags, attributes, text outside of style."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text, self.style, self._in_style = "", "", False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]


def page_of(folder: Path) -> tuple[Page, str]:
    html = write_report(folder).read_text(encoding="utf-8")
    return Page(html), html


def check_harmless(page: Page, html: str) -> None:
    assert set(page.tags) <= TAGS
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "action", "srcset")]
    assert all(re.fullmatch(r"#[a-z]+", value) for value in page.values("href"))
    words = [value for _, name, value in page.attributes if name not in ("aria-label", "title")]
    assert set(re.findall(r"url\([^)]*\)|@import|evil|//", " ".join([page.style, *words]))) <= {"url(#hatch)", "//"}
    assert [value for value in words if "//" in value] == ["http://www.w3.org/2000/svg"] * html.count("xmlns=")
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.values("content")[0]
    assert all(c == "\n" or c.isprintable() for c in html)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Page, str]:
    return page_of(write_run(tmp_path_factory.mktemp("run"), rounds=150))


def test_the_page_says_what_was_run_and_what_came_of_it(run):
    page, _ = run
    for words in (
        "compaction", "qwen3", "finished", "150 of 150 rounds", "dp 2 on cpu", "45 prompts × 8 sessions per round",  # noqa: RUF001
        "mini-batches of 15", "121,472 parameters", "Rows trained", "Padding rows", "Sessions failed",
        "Optimizer steps", "450", "1 min 12 s", "mean of the first and last 10 rounds", "Tokens per second",
        "timed out after 300 s", "skipped (no loss tokens)", "log_probs", "betas", "[0.9, 0.999]", "made.model_type",
    ):  # fmt: skip
        assert words in page.text, words
    assert re.search(r"Score\s*0\.07 →\s*0\.9\d", page.text)


@pytest.mark.parametrize(
    ("ledger", "trained"),
    [
        ({"rows": {"skipped (no loss tokens)": 10}}, "0"),
        ({"rows": {"trained": 7, "dropped (over_long)": 3}}, "7"),
        ({}, "10"),
    ],
)
def test_rows_trained_are_the_ledgers_and_without_a_ledger_all(tmp_path, ledger, trained):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("round", round=1, rows=10, ledger=ledger))
    (stat,) = [stat for stat in headline(read_events(tmp_path / "events.jsonl")) if stat.label == "Rows trained"]
    assert stat.value == trained


def test_the_page_has_every_section(run):
    page, _ = run
    sections = ["score", "rows", "metrics", "time", "grid", "ledger", "trajectories", "config"]
    assert [value for value in page.values("id") if value in sections] == sections
    assert [value[1:] for value in page.values("href")] == sections
    charts = [value for value in page.values("aria-label") if "rounds 1 to 150" in value]
    assert len(charts) == 1 + 3 + 9 + 1
    assert {"Plan of round 1", "Plan of round 150"} <= set(page.values("aria-label"))
    assert len(set(page.values("id"))) == len(page.values("id"))


def test_tokens_are_shaded_by_their_advantage_and_say_it(run):
    page, _ = run
    kinds = Counter(value.split()[-1] for value in page.values("class") if value.startswith("t "))
    assert kinds["prompt"] > 20
    assert kinds["seen"] > 5
    assert any(kind.startswith("up") for kind in kinds)
    assert any(re.fullmatch(r"advantage [+−][\d.]+, log-prob .+", value) for value in page.values("title"))  # noqa: RUF001
    assert [shade(a, 2.0) for a in (2, 0.1, 0, -0.1, -2)] == ["up4", "up1", "flat", "down1", "down4"]


def test_the_tokens_of_an_image_are_shown_as_one_and_counted():
    pad = "<|image_pad|>"
    tokens = ("1", *[pad] * 900, "=", "7", "7", "7", "7", "7", *[pad] * 3)
    trajectory = SampledTrajectory(
        role="", reward=None, tokens=tokens, prompt_tokens=902, mask=(1,) * 5 + (0,) * 3,
        advantages=(1,) * 5 + (0,) * 3, log_probs=(-1,) * 5 + (0,) * 3, finish_reason="stop",
    )  # fmt: skip
    session = SampledSession(prompt="p", session=0, score=1.0, task={}, trajectories=(trajectory,))
    (((_, (shown,)),), _) = shown_samples([SamplesEvent(round=1, sessions=(session,))])
    (row,) = shown.trajectories
    assert [token.text for token in row.tokens] == ["1", f"{pad} x 900", "=", *"77777", pad, pad, pad]
    assert (row.note, row.facts[0]) == ("", "910 tokens")


def test_an_ordinary_page_is_harmless_and_small(run):
    page, html = run
    check_harmless(page, html)
    assert len(html) < 600_000


def test_hostile_text_is_text(tmp_path):
    page, html = page_of(write_hostile_run(tmp_path))
    check_harmless(page, html)
    for text in HOSTILE:
        assert visible(text, 100) in page.text
    assert "alert(1)" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "999,700 more characters" in page.text
    assert len(html) < 600_000


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("end", [None, "interrupted", "failed"])
def test_a_short_run_has_a_page(tmp_path, rounds, end):
    page, html = page_of(write_run(tmp_path, rounds=rounds, end=end))
    check_harmless(page, html)
    assert (end or "running") in page.text
    assert ("no numbers yet" in page.text) == (rounds == 0)


def test_an_empty_file_has_a_page(tmp_path):
    (tmp_path / "events.jsonl").touch()
    page, _ = page_of(tmp_path)
    assert "0 rounds" in page.text
    assert "No round is recorded yet." in page.text


def test_many_rounds_make_a_small_page(tmp_path):
    rng = np.random.default_rng(0)
    fields = [made_round(rng, number, 100) for number in range(1, 101)]
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("start", **START))
        for number in range(1, 10_001):
            log.write(event("round", **{**fields[number % 100], "round": number}))
    html = write_report(tmp_path).read_text()
    assert len(html) < 1_500_000
    assert "10,000 of 150 rounds" in html


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_size": 10**9, "batch_size": 2, "mini_batch_size": 1},
        {"dp_size": 2, "batch_size": 10**12, "mini_batch_size": 1},
        {"dp_size": 7, "batch_size": 2, "mini_batch_size": 10**6 + 3, "rollout_n": 10**6 + 33, "align": "lcm"},
        {"dp_size": 2, "batch_size": 2, "mini_batch_size": 1, "micro_batch_multiple": 10**9},
        {"dp_size": 2, "batch_size": 2, "mini_batch_size": 1, "epochs": 10**9},
    ],
)
def test_a_layout_that_asks_for_too_much_is_not_planned(tmp_path, layout):
    row = {"prompt": ["a"], "session": [0], "trajectory": [0], "prompt_tokens": [1], "response_tokens": [1]}
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("rows", round=1, columns=row, layout=layout))
    page, _ = page_of(tmp_path)
    assert "plan is too large to draw" in page.text


def test_sessions_that_a_resumed_run_re_used_are_counted(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        for round, reused in ((1, 0), (2, 180)):
            log.write(
                event(
                    "round", round=round, metrics={}, ledger={"sessions": {"trained": 360}, "reused_sessions": reused}
                )
            )
    page, _ = page_of(tmp_path)
    assert "180 sessions were already in the store" in page.text


def test_a_plan_that_cannot_be_made_again_says_why(tmp_path):
    row = {"prompt": ["a"], "session": [0], "trajectory": [0], "prompt_tokens": [9], "response_tokens": [9]}
    layout = {"dp_size": 1, "batch_size": 1, "mini_batch_size": 1, "micro_batch_tokens": 4}
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("rows", round=1, columns=row))
        log.write(event("rows", round=2, columns=row, layout=layout))
    page, _ = page_of(tmp_path)
    assert "do not contain the layout" in page.text
    assert "micro_batch_tokens" in page.text


def test_a_new_page_takes_the_place_of_the_old_and_leaves_nothing_else(tmp_path):
    write_run(tmp_path, rounds=2)
    (tmp_path / "report.html").write_text("old")
    assert write_report(tmp_path).read_text() != "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


def test_a_report_on_a_strangers_folder_writes_into_no_file_of_the_user(tmp_path):
    """Links under the page's name and under names that could be guessed are replaced, not followed."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, rounds=1)
    for name in ("report.html", f".report.html.{os.getpid()}"):
        (folder / name).symlink_to(precious)
    write_report(folder)
    assert precious.read_text() == "mine"
    assert "<html" in (folder / "report.html").read_text()


def test_the_config_is_shown_whole(run):
    page, _ = run
    for section, values in CONFIG.items():
        assert section in page.text
        for key in values if isinstance(values, dict) else ():
            assert key in page.text


def report(*args: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    parsed = parser.parse_args(["report", *args])
    parsed.run(parsed)


def test_the_command_writes_the_page_and_prints_its_path(tmp_path, capsys):
    write_run(tmp_path, rounds=2)
    report(str(tmp_path))
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


def test_the_command_says_what_is_wrong(tmp_path):
    with pytest.raises(EventsError, match="no such folder"):
        report(str(tmp_path / "none"))
    with pytest.raises(EventsError, match=r"has no events.jsonl"):
        report(str(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\nbroken\n{}\n')
    with pytest.raises(EventsError, match=r"events.jsonl, line 2: b'broken\\n' is not a JSON object"):
        report(str(tmp_path))


def test_the_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        report("--help")
    assert "raggedright report runs/latest --open" in capsys.readouterr().out


def test_failed_sessions_are_grouped_by_their_cause(tmp_path):
    """There were up to 40 rows of one cause, and one row per number in a cause."""
    rng = np.random.default_rng(0)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("start", **START))
        for number in (1, 2):
            failed = [{"prompt": f"p{i}", "session": 0, "cause": "timed out after 300 s"} for i in range(50)]
            failed.append({"prompt": "q", "session": number, "cause": f"ValueError: {number}"})
            log.write(event("round", **{**made_round(rng, number, 2), "failed": failed}))
    _, html = page_of(tmp_path)
    table = html.partition('<table class="causes">')[2].partition("</table>")[0]
    assert table.count("<tr>") == 1 + 2
    assert "such as ValueError: 1<" in table
    assert table.count("timed out after 300 s") == 1
    assert "100</td>" in table
    assert "p47/0 in round 2, p48/0 in round 2, p49/0 in round 2, + 97 more sessions" in table
    assert "q/1 in round 1, q/2 in round 2" in table


def test_advantages_that_are_all_zero_have_no_scale(tmp_path):
    """The legend read: advantage -0 ... +0."""
    trajectory = {
        "prompt_tokens": 1, "tokens": ["a", "b"], "mask": [1], "advantages": [0.0], "log_probs": [-1.0], "images": [],
    }  # fmt: skip
    session = {"prompt": "p", "session": 0, "task": {"digits": "1"}, "score": 0.0, "trajectories": [trajectory]}
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("start", **START))
        log.write(event("round", **made_round(np.random.default_rng(0), 1, 1)))
        log.write(event("samples", round=1, sessions=[session]))
    page, _ = page_of(tmp_path)
    assert "every advantage is 0" in page.text
    assert "\N{MINUS SIGN}0 " not in page.text
    assert "+0" not in page.text


def test_large_scores_have_their_own_size_and_few_digits_in_the_headline(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event("start", **START))
        for number, score in ((1, -1.5e308), (2, 1e308)):
            log.write(event("round", round=number, metrics={"critic/score/mean": score}))
    (stat,) = (stat for stat in headline(read_events(tmp_path / "events.jsonl")) if stat.label == "Score")
    assert (stat.before, stat.value) == ("\N{MINUS SIGN}1.5e+308", "1e+308")
