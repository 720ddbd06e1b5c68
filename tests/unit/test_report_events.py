"""events.jsonl: what is written comes back, a crash costs one line at most, and a stranger's file is only data."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raggedright.report import events as module
from raggedright.report.events import EventLog, EventsError, Failure, RunEvents, read_events
from unit.made_runs import LAYOUT, columns_of, event, made_rows, write_run


def lines(path: Path, *events: object) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in events))
    return path


def round_line(number: int, score: float = 0.0, **more: object) -> dict[str, object]:
    return {"event": "round", "round": number, "metrics": {"critic/score/mean": score}, **more}


def test_what_is_written_comes_back(tmp_path):
    events = read_events(write_run(tmp_path, rounds=20) / "events.jsonl")
    assert events.start is not None
    assert events.end is not None
    assert (events.start.layout, events.start.world.dp, events.start.num_parameters) == (LAYOUT, 2, 121_472)
    assert [each.round for each in events.rounds] == list(range(1, 21))
    assert [each.round for each in events.evals] == [10, 20]
    assert events.end.reason == "finished"
    assert {each.rows.num_prompts for each in events.rows} == {45}
    assert all(each.layout == LAYOUT for each in events.rows)
    assert events.samples[0].sessions[0].trajectories[0].tokens[0] == "carry"


def test_the_file_is_strict_json_and_keeps_what_is_not_finite(tmp_path):
    values = {"nan": math.nan, "up": math.inf, "down": np.float32(-np.inf), "one": np.float32(1), "two": np.int64(2)}
    with EventLog(tmp_path / "e") as log:
        log.write(event("round", round=1, metrics=values, seconds={"plan": np.float64(0.5)}, failed=()))

    def refuse(word: str) -> float:
        raise AssertionError(word)

    text = (tmp_path / "e").read_text()
    assert text.count("\n") == 1
    json.loads(text, parse_constant=refuse)
    metrics = read_events(tmp_path / "e").rounds[0].metrics
    assert math.isnan(metrics["nan"])
    assert (metrics["up"], metrics["down"], metrics["one"], metrics["two"]) == (math.inf, -math.inf, 1.0, 2.0)


def test_a_value_that_json_cannot_express_is_refused_and_nothing_is_written(tmp_path):
    with EventLog(tmp_path / "e") as log, pytest.raises(TypeError, match="not JSON serializable"):
        log.write(event("start", config={"a": object()}))
    assert (tmp_path / "e").read_bytes() == b""


@pytest.mark.parametrize(
    "rest", [b'{"event": "rou', b"\0\0\0\0", b'{"event": "round", "round": 3, "x": "\xe2\x82', b"{}"[:1]]
)
def test_a_half_line_at_the_end_is_left_out(tmp_path, rest):
    path = lines(tmp_path / "e", round_line(1), round_line(2))
    path.write_bytes(path.read_bytes() + rest)
    assert [each.round for each in read_events(path).rounds] == [1, 2]
    with EventLog(path) as log:  # and does not spoil the line that is written next
        log.write(event("round", round=3))
    assert [each.round for each in read_events(path).rounds] == [1, 2, 3]


def test_a_whole_last_line_counts_even_without_its_newline(tmp_path):
    path = lines(tmp_path / "e", round_line(1), round_line(2))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_events(path).rounds) == 2
    with EventLog(path) as log:
        log.write(event("round", round=3))
    assert len(read_events(path).rounds) == 3


@pytest.mark.parametrize("bad", ["{", "[]", '"x"', "nonsense", "\x00", "[" * 100_000, "1" * 10_000])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path, bad):
    with pytest.raises(EventsError, match=r"line 2: .* is not a JSON object"):
        read_events(lines(tmp_path / "e", round_line(1), bad, round_line(2)))


def test_the_last_line_of_a_round_wins(tmp_path):
    path = lines(tmp_path / "e", round_line(1, 0.1), round_line(2, 0.2), round_line(2, 0.3), round_line(3, 0.4))
    assert [each.metrics["critic/score/mean"] for each in read_events(path).rounds] == [0.1, 0.3, 0.4]


def test_a_run_that_went_back_to_a_checkpoint_has_no_later_rounds_yet(tmp_path):
    later = [{"event": "eval", "round": 4, "metrics": {"eval/score/mean": 1}}, {"event": "samples", "round": 4}]
    first = [{"event": "start"}, *map(round_line, (1, 2, 3, 4)), *later, {"event": "end", "reason": "interrupted"}]
    events = read_events(lines(tmp_path / "e", *first, {"event": "start", "version": "2"}, round_line(3, 0.5)))
    assert [each.round for each in events.rounds] == [1, 2, 3]
    assert (events.evals, events.samples, events.end) == ((), (), None)
    assert events.start is not None
    assert events.start.version == "2"


def test_what_is_unknown_or_missing_is_passed_over(tmp_path):
    path = lines(
        tmp_path / "e",
        {"event": "start", "new": 1},
        {"event": "weather"},
        {"no": "event"},
        "",
        {"event": "round", "round": 0},
        {"event": "round", "round": 1, "metrics": None, "failed": [{}], "ledger": {"sessions": None}},
        {"event": "samples", "round": 1},
        {"event": "eval", "round": 1},
        {"event": "rows", "round": 1, "columns": {}},
        {"event": "end"},
    )
    events = read_events(path)
    assert [each.round for each in events.rounds] == [0, 1]
    assert events.rounds[1].failed == (Failure(),)
    assert events.rounds[0].rows is None
    assert len(events.rows[0].rows) == 0
    assert read_events(lines(tmp_path / "none")) == RunEvents()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"event": "round"}, "round is .*: field required"),
        ({"event": "round", "round": True}, "round is True"),
        ({"event": "round", "round": -1}, "round is -1"),
        ({"event": "round", "round": 10**30}, "round is 10000"),
        ({"event": "round", "round": 1, "metrics": []}, r"metrics is \[\]: "),
        ({"event": "round", "round": 1, "metrics": {"a": "x"}}, "metrics.a is 'x': "),
        ({"event": "round", "round": 1, "ledger": {"rows": {"trained": 0.5}}}, "ledger.rows.trained is 0.5: "),
        ({"event": "round", "round": 1, "failed": ["x"]}, "failed.0 is 'x': "),
        ({"event": "round", "round": 1, "failed": [{"cause": 3}]}, "failed.0.cause is 3: "),
        ({"event": "start", "layout": {"dp_size": 0, "batch_size": 1, "mini_batch_size": 1}}, "dp_size is 0"),
        ({"event": "start", "layout": {"dp_size": 1}}, "layout.batch_size is .*: field required"),
        ({"event": "start", "config": "x"}, "config is 'x': "),
        ({"event": "rows", "round": 1, "columns": {"prompt": ["a"], "session": ["x" * 10**6]}}, "session is 'xxx"),
        ({"event": "rows", "round": 1, "columns": {"prompt": ["a"], "session": [[1, 2]]}}, "session has shape"),
        ({"event": "rows", "round": 1, "columns": {"prompt": [1]}}, "prompt is 1; "),
        ({"event": "samples", "round": 1, "sessions": [{"trajectories": [{"tokens": [7]}]}]}, "tokens.0 is 7: "),
    ],
)  # fmt: skip
def test_a_wrong_type_is_an_error_that_names_the_line_and_the_key(tmp_path, line, message):
    with pytest.raises(EventsError, match=f"e, line 2: .*{message}") as raised:
        read_events(lines(tmp_path / "e", {"event": "start"}, line))
    assert len(str(raised.value)) < 1000


def test_a_number_that_no_float_holds_is_infinite(tmp_path):
    path = lines(tmp_path / "e", {"event": "round", "round": 1, "metrics": {"a": 10**400, "b": -(10**400), "c": True}})
    assert read_events(path).rounds[0].metrics == {"a": math.inf, "b": -math.inf, "c": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_FILE_BYTES", 100, "a report reads at most 100"),
        ("MAX_LINE_BYTES", 10, "line 1: more than 10 bytes"),
    ],
)
def test_sizes_have_an_end(tmp_path, monkeypatch, name, value, message):
    path = lines(tmp_path / "e", *map(round_line, range(40)))
    monkeypatch.setattr(module, name, value)
    with pytest.raises(EventsError, match=message):
        read_events(path)


def test_of_many_rows_the_first_and_the_last_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    with EventLog(tmp_path / "e") as log:
        for number in range(1, 41):
            log.write(event("rows", round=number, columns=columns_of(made_rows(rng, number, prompts=1))))
    kept = [each.round for each in read_events(tmp_path / "e").rows]
    assert (len(kept), kept[0], kept[1], kept[-1]) == (module.MAX_PICTURES, 1, 26, 40)


def test_a_file_that_is_not_there_is_an_error_in_a_sentence(tmp_path):
    with pytest.raises(EventsError, match="No such file or directory; a run writes its events there"):
        read_events(tmp_path / "nothing")


def test_reading_events_needs_no_torch():
    code = "import sys, raggedright.report.events; print(*sorted({'torch', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_start_is_optional(tmp_path):
    assert read_events(lines(tmp_path / "e", round_line(1))).start is None


def test_a_log_that_cannot_be_opened_leaves_no_open_file(tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    for part in ("_repair_end", "sync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"raggedright.report.events.{part}", fail)
            with pytest.raises(OSError, match="No space") as kept:  # its frames hold the log
                EventLog(tmp_path / "e")
        assert str(tmp_path / "e") not in {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}, kept


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "e").symlink_to("/proc/self/mem")
    with pytest.raises(EventsError, match=f"{tmp_path}/e: Input/output error"):
        read_events(tmp_path / "e")
