"""What `Rows.from_columns` refuses: the error names the field, and the row where one is at fault."""

import numpy as np
import pytest

from raggedright import Rows, RowsError

COLUMNS: dict[str, object] = {
    "prompt": ["a", "b", "c"],
    "session": [0, 0, 0],
    "trajectory": [0, 0, 0],
    "prompt_tokens": [1, 2, 3],
    "response_tokens": [4, 5, 6],
    "loss_tokens": [4, 5, 6],
    "is_padding": [False, False, True],
}
COUNTS = ("session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")


def rows_with(**columns: object) -> Rows:
    return Rows.from_columns(**{**COLUMNS, **columns})  # type: ignore[arg-type]


def error_of(**columns: object) -> str:
    with pytest.raises(RowsError) as error:
        rows_with(**columns)
    return str(error.value)


def test_lists_and_arrays_of_any_whole_number_type_are_columns() -> None:
    arrays = {name: np.array(COLUMNS[name], dtype=np.uint16) for name in COUNTS}
    assert list(rows_with(**arrays).to_records()) == list(rows_with().to_records())


def test_the_callers_arrays_stay_theirs() -> None:
    session = np.zeros(3, dtype=np.int64)
    rows = rows_with(session=session)
    session[0] = 5
    assert rows.session.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [-1, 2**31, 2**40])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_out_of_range_names_the_row_and_the_field(name: str, value: int) -> None:
    assert f"row 1: {name} is {value:,}" in error_of(**{name: [0, value, 0]})


@pytest.mark.parametrize("value", [1.5, "1", None, 2**70, [1]])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_the_wrong_type_names_the_field(name: str, value: object) -> None:
    assert name in error_of(**{name: [0, value, 0]})


@pytest.mark.parametrize("name", COUNTS)
def test_a_boolean_is_no_count_even_among_numbers(name: str) -> None:
    assert name in error_of(**{name: [True, False, True]})
    assert name in error_of(**{name: [0, True, 0]})


@pytest.mark.parametrize("name", [*COUNTS, "is_padding"])
def test_a_column_of_another_length_names_the_field_and_both_lengths(name: str) -> None:
    message = error_of(**{name: [0, 1]})
    assert message.startswith(name)
    assert "2" in message
    assert "3" in message


def test_a_prompt_that_is_no_string_names_the_row() -> None:
    assert error_of(prompt=["a", 7, "c"]).startswith("row 1: prompt is 7")


def test_loss_tokens_above_response_tokens_name_the_row_and_both_numbers() -> None:
    assert error_of(loss_tokens=[4, 5, 7]).startswith("row 2: loss_tokens is 7 and response_tokens 6")


def test_padding_flags_that_are_no_booleans_are_refused() -> None:
    assert "is_padding" in error_of(is_padding=[0, 1, 0])


def test_a_key_given_twice_is_named() -> None:
    assert "row b/0/0 is given twice" in error_of(prompt=["b", "a", "b"])


def test_empty_columns_are_no_rows_whatever_their_type() -> None:
    assert len(rows_with(**{name: [] for name in COLUMNS})) == 0
