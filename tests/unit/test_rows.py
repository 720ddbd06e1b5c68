import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raggedright import Rows, RowsError

RECORD: dict[str, object] = {
    "prompt": "p0",
    "session": 0,
    "trajectory": 0,
    "prompt_tokens": 12,
    "response_tokens": 30,
    "loss_tokens": 20,
}
COUNTS = ("session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")
REQUIRED = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens")


def some_rows() -> Rows:
    """Rows out of order, with a session that emitted two, names that sort unlike numbers, and a padding row."""
    return Rows.from_columns(
        prompt=["p10", "p2", "p2", "p2", "pad"],
        session=[0, 1, 0, 1, 0],
        trajectory=[0, 1, 3, 0, 0],
        prompt_tokens=[1, 2, 3, 4, 1],
        response_tokens=[5, 6, 7, 8, 1],
        loss_tokens=[5, 0, 3, 8, 0],
        is_padding=[False, False, False, False, True],
    )


def lines(*records: object) -> io.StringIO:
    return io.StringIO("".join(json.dumps(record) + "\n" for record in records))


def error_of(*records: object) -> str:
    """The error that the last of these lines causes; the same as for records, but for the place."""
    with pytest.raises(RowsError) as from_lines:
        Rows.from_jsonl(lines(*records))
    with pytest.raises(RowsError) as from_records:
        Rows.from_records(records)  # type: ignore[arg-type]
    message = str(from_lines.value)
    assert message.startswith(f"line {len(records)}: ")
    assert str(from_records.value).startswith(f"record {len(records) - 1}: ")
    return message


def test_keys_name_prompt_session_and_trajectory() -> None:
    assert some_rows().key.tolist() == ["p10/0/0", "p2/1/1", "p2/0/3", "p2/1/0", "pad/0/0"]


def test_order_and_indexes_follow_the_sorted_names() -> None:
    rows = some_rows()
    assert rows.order.tolist() == [0, 3, 1, 2, 4]
    assert rows.prompt_index.tolist() == [0, 1, 1, 1, 2]
    assert rows.session_index.tolist() == [0, 2, 1, 2, 3]
    assert (rows.num_prompts, rows.num_sessions, len(rows)) == (3, 4, 5)
    assert rows.tokens.tolist() == [6, 8, 10, 12, 2]


def test_sessions_of_two_prompts_with_one_number_are_two_sessions() -> None:
    rows = Rows.from_records([{**RECORD, "prompt": p, "trajectory": t} for p in "ab" for t in (0, 1)])
    assert rows.session_index.tolist() == [0, 0, 1, 1]


def test_indexes_do_not_depend_on_the_order_of_rows() -> None:
    rows = some_rows()
    shuffle = np.array([3, 0, 4, 2, 1])
    taken = rows.take(shuffle)
    for name in ("order", "prompt_index", "session_index"):
        assert getattr(taken, name).tolist() == getattr(rows, name)[shuffle].tolist()


def test_loss_tokens_default_to_response_tokens() -> None:
    record = {name: RECORD[name] for name in REQUIRED}
    assert Rows.from_records([record]).loss_tokens.tolist() == [30]
    assert Rows.from_jsonl(lines(record)).loss_tokens.tolist() == [30]
    columns = Rows.from_columns(prompt=["a"], session=[0], trajectory=[0], prompt_tokens=[1], response_tokens=[9])
    assert columns.loss_tokens.tolist() == [9]
    assert columns.is_padding.tolist() == [False]


def test_rows_survive_records_and_jsonl(tmp_path: Path) -> None:
    rows = some_rows()
    rows.to_jsonl(tmp_path / "rows.jsonl")
    buffer = io.StringIO()
    rows.to_jsonl(buffer)
    assert (tmp_path / "rows.jsonl").read_text() == buffer.getvalue()
    buffer.seek(0)
    for again in (
        Rows.from_records(rows.to_records()),
        Rows.from_jsonl(tmp_path / "rows.jsonl"),
        Rows.from_jsonl(str(tmp_path / "rows.jsonl")),
        Rows.from_jsonl(buffer),
    ):
        assert list(again.to_records()) == list(rows.to_records())
        assert again.session_index.tolist() == rows.session_index.tolist()


def test_a_jsonl_line_holds_the_fields_of_the_format() -> None:
    buffer = io.StringIO()
    Rows.from_records([RECORD]).to_jsonl(buffer)
    assert json.loads(buffer.getvalue()) == RECORD


@pytest.mark.parametrize("prompt", ["a/b", "ü\n\u2028", "\ud800", "", '"', "<padding>0"])
def test_any_string_names_a_prompt(prompt: str, tmp_path: Path) -> None:
    rows = Rows.from_records([{**RECORD, "prompt": prompt}])
    rows.to_jsonl(tmp_path / "rows.jsonl")
    assert Rows.from_jsonl(tmp_path / "rows.jsonl").prompt.tolist() == [prompt]


def test_blank_lines_and_unknown_fields_are_passed_over() -> None:
    text = "\n" + json.dumps({**RECORD, "reward": 1.5, "model": None}) + "\n  \n"
    assert len(Rows.from_jsonl(io.StringIO(text))) == 1


def test_no_rows_are_rows() -> None:
    nothing: list[int] = []
    for rows in (
        Rows.from_records([]),
        Rows.from_jsonl(io.StringIO("\n")),
        Rows.from_columns(
            prompt=[], session=nothing, trajectory=nothing, prompt_tokens=nothing, response_tokens=nothing
        ),
        some_rows().take(np.zeros(5, dtype=bool)),
    ):
        assert (len(rows), rows.num_prompts, rows.num_sessions) == (0, 0, 0)
        assert list(rows.to_records()) == []


def test_arrays_are_read_only() -> None:
    for name in ("prompt", "session", "loss_tokens", "is_padding", "order", "session_index"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(some_rows(), name)[0] = 0


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    record = {key: value for key, value in RECORD.items() if key != name}
    assert f"field {name} is missing" in error_of({**RECORD, "trajectory": 1}, record)


@pytest.mark.parametrize("value", [True, 1.0, 1.5, "1", None, [1], {}, -1, 2**31, 2**70, float("nan"), float("inf")])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_the_wrong_type_or_size_is_named(name: str, value: object) -> None:
    message = error_of({**RECORD, "trajectory": 1}, {**RECORD, name: value})
    shown = f"{value:,}" if type(value) is int else repr(value)
    assert f": {name} is {shown}" in message
    assert "integer" in message


@pytest.mark.parametrize("value", [7, None, True, ["p"], 1.5])
def test_a_prompt_that_is_no_string_is_named(value: object) -> None:
    assert f"prompt is {value!r}" in error_of({**RECORD, "prompt": value})


@pytest.mark.parametrize("value", [0, 1, None, "false"])
def test_a_padding_flag_that_is_no_boolean_is_named(value: object) -> None:
    assert f"is_padding is {value!r}" in error_of({**RECORD, "is_padding": value})


def test_loss_tokens_above_response_tokens_are_an_error_with_both_numbers() -> None:
    message = error_of({**RECORD, "response_tokens": 1_000, "loss_tokens": 1_001})
    assert "loss_tokens is 1,001 and response_tokens 1,000" in message


def test_a_key_given_twice_names_both_lines() -> None:
    message = error_of(RECORD, {**RECORD, "trajectory": 1}, {**RECORD, "prompt_tokens": 99})
    assert "p0/0/0" in message
    assert "line 1" in message


@pytest.mark.parametrize("name", ["loss_token", "losstokens", "loss-tokens", "lossTokens", "los_tokens", "LOSS_TOKENS"])
def test_a_misspelt_loss_tokens_is_refused(name: str) -> None:
    record = {key: value for key, value in RECORD.items() if key != "loss_tokens"}
    message = error_of({**record, name: 3})
    assert f"field {name} is unknown" in message
    assert "loss_tokens" in message


@pytest.mark.parametrize("value", [[], "text", 3, None, [RECORD]])
def test_a_line_that_is_no_object_is_an_error(value: object) -> None:
    assert "not an object" in error_of(RECORD, value)


def test_a_number_of_thousands_of_digits_is_refused_as_such() -> None:
    """Python refuses to read it, which is no fault of the line's JSON."""
    text = json.dumps({**RECORD, "session": 7}).replace("7", "1" * 5_000)
    with pytest.raises(RowsError, match=r"^line 2: a number has more than 4,300 digits; give a smaller one"):
        Rows.from_jsonl(io.StringIO("\n" + text))


@pytest.mark.parametrize("inside", ["", '"extra": {"a": 1, "a": 2}, '])
def test_a_key_that_an_object_has_twice_is_refused(inside: str) -> None:
    text = json.dumps(RECORD)[1:] if inside else json.dumps(RECORD)[1:].replace("}", ', "session": 1}')
    with pytest.raises(RowsError, match=rf"^line 1: the key '{'a' if inside else 'session'}' is given 2 times"):
        Rows.from_jsonl(io.StringIO("{" + inside + text))


@pytest.mark.parametrize("place", [0, 499, 500, 1_233])
def test_a_wrong_row_of_many_is_named_wherever_it_stands(place: int) -> None:
    """Rows are checked many at a time; the error is about one."""
    records = [{**RECORD, "trajectory": i} for i in range(1_234)]
    records[place]["loss_tokens"] = 31
    with pytest.raises(RowsError, match=rf"^line {place + 1}: loss_tokens is 31"):
        Rows.from_jsonl(lines(*records))
    records[place] |= {"loss_tokens": 3, "trajectory": 1 if place == 0 else 0}
    first, second = (1, 2) if place == 0 else (1, place + 1)
    with pytest.raises(RowsError, match=rf"^line {second}: row p0/0/[01] is in line {first} already"):
        Rows.from_jsonl(lines(*records))


def test_rows_read_many_at_a_time_are_those_read_one_by_one() -> None:
    records = [
        {**{name: RECORD[name] for name in REQUIRED}, "prompt": f"p{i}", "reward": 0.5}
        | ({"loss_tokens": i % 31} if i % 3 else {})
        | ({"is_padding": True} if i % 7 == 0 else {})
        for i in range(1_100)
    ]
    rows = Rows.from_records(records)
    singly = [record for each in records for record in Rows.from_records([each]).to_records()]
    assert list(rows.to_records()) == singly


@pytest.mark.parametrize("text", ["{", "{'prompt': 1}", "p0 0 0 12 30", "[" * 100_000, "\ufeff{}", "{} {}"])
def test_a_line_that_is_not_json_names_its_line(text: str) -> None:
    with pytest.raises(RowsError, match=r"^line 3: not JSON"):
        Rows.from_jsonl(io.StringIO(json.dumps(RECORD) + "\n\n" + text + "\n"))


@pytest.mark.parametrize("number", [1, 4])
def test_a_line_that_is_not_utf8_names_its_line(number: int, tmp_path: Path) -> None:
    good = [json.dumps({**RECORD, "trajectory": i}).encode() for i in range(5)]
    good[number - 1] = b'{"prompt": "\xff"}'
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(good))
    with pytest.raises(RowsError, match=rf"^line {number}: not UTF-8"):
        Rows.from_jsonl(tmp_path / "rows.jsonl")


def test_padding_rows_never_share_a_prompt_with_real_rows() -> None:
    for name in ("<padding>", "<padding>0", "<<padding>>0", "<padding>x", "p"):
        rows = Rows.from_records([{**RECORD, "prompt": name}]).with_padding(3, 2).with_padding(2, 8)
        assert len(set(rows.prompt.tolist())) == 6
        assert rows.is_padding.tolist() == [False] + [True] * 5
        assert rows.prompt_tokens.tolist() == [12, 1, 1, 1, 1, 1]
        assert rows.response_tokens.tolist() == [30, 1, 1, 1, 7, 7]
        assert rows.loss_tokens.tolist() == [20] + [0] * 5


def test_the_text_form_counts_rows_sessions_and_prompts() -> None:
    assert repr(some_rows()) == "Rows(5 rows, 1 of them padding; 4 sessions of 3 prompts)"


def test_importing_raggedright_needs_numpy_alone() -> None:
    code = (
        "import sys; before = {*sys.modules}; import raggedright; "
        "print(*{name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    third_party = {name for name in imported if not name.startswith("_")}
    assert {"raggedright", "numpy"} <= third_party
    assert not third_party & {"torch", "rich", "pydantic"}
    assert third_party <= {"raggedright", "numpy"}
