"""Tasks: what is in a round, and what a file or function may be."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright.agents.agent_session import Task
from raggedright.agents.task_sources import FileTasks, load_tasks
from raggedright.errors import ConfigError

DATA = [{"question": f"q{i}", "nested": {"numbers": [i, i + 1], "none": None}} for i in range(5)]


def write(path: Path, lines) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def uids(tasks: list[Task]) -> list[str]:
    return [task.uid for task in tasks]


@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    num_rounds=st.integers(1, 40),
)
def test_a_round_has_no_task_twice_and_an_epoch_each_task_once(size, batch_size, seed, num_rounds):
    batch_size = min(size, batch_size)
    made = [Task(uid=str(i), data={}) for i in range(size)]
    tasks = FileTasks("made", made, seed=seed)
    rounds = [uids(tasks.of_round(i, batch_size)) for i in range(1, num_rounds + 1)]
    assert all(len({*names}) == batch_size for names in rounds)
    stream = [name for names in rounds for name in names]
    for start in range(0, len(stream) - size + 1, size):
        assert Counter(stream[start : start + size]) == Counter(map(str, range(size)))
    backwards = FileTasks("made", made, seed=seed)
    assert [uids(backwards.of_round(i, batch_size)) for i in range(num_rounds, 0, -1)] == rounds[::-1]


@given(size=st.integers(1, 30), most=st.integers(1, 30), seed=st.integers(0, 2**40), data=st.data())
def test_rounds_that_draw_what_they_need_have_no_task_twice_and_an_epoch_each_task_once(size, most, seed, data):
    """What is at a place does not depend on how the rounds before it were cut."""
    most = min(size, most)
    counts = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=30))
    made = [Task(uid=str(i), data={}) for i in range(size)]
    tasks, stream = FileTasks("made", made, seed=seed), []
    for count in counts:
        names = uids(tasks.draw(len(stream), count, batch_size=1, most=most))
        assert len({*names}) == count
        stream += names
    for start in range(0, len(stream) - size + 1, size):
        assert Counter(stream[start : start + size]) == Counter(map(str, range(size)))
    again = FileTasks("made", made, seed=seed)
    assert [uids(again.draw(i, 1, batch_size=1, most=most))[0] for i in range(len(stream))] == stream


def test_every_epoch_and_seed_has_an_order_of_its_own():
    made = [Task(uid=str(i), data={}) for i in range(20)]
    orders = {tuple(uids(FileTasks("made", made, seed=seed).of_round(i, 20))) for seed in range(3) for i in range(1, 5)}
    assert len(orders) == 12


def test_jsonl_and_parquet_say_the_same(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DATA), tmp_path / "t.parquet")
    source = write(tmp_path / "t.jsonl", ["\ufeff", *DATA[:2], "\n", *DATA[2:]])
    from_lines, from_table = load_tasks(source, seed=3), load_tasks(str(tmp_path / "t.parquet"), seed=3)
    assert from_lines.of_round(1, 5) == from_table.of_round(1, 5)
    assert {task.uid: task.data for task in from_lines.of_round(2, 5)} == {str(i): DATA[i] for i in range(5)}


def test_a_uid_is_kept(tmp_path: Path):
    source = write(tmp_path / "t.jsonl", [{"uid": "first"}, {"uid": 17}, {"question": "?"}])
    assert sorted(uids(load_tasks(source, seed=0).of_round(1, 3))) == ["17", "2", "first"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": 1}\n', "{broken\n"], "t.jsonl, line 2: not JSON"),
        (['{"a": 1}\n', "[1]\n"], "t.jsonl, line 2: a task is an object with fields, and this is a list"),
        ([{"uid": "x"}, {"a": 1}, {"uid": "x"}], "line 3: field uid is 'x', as in .*t.jsonl, line 1; give each"),
        ([{"uid": None}], "line 1: field uid is None; it takes text or an integer"),
        ([{"uid": 1.5}], "line 1: field uid is 1.5; it takes text"),
        ([], "which has no tasks; one line or row is one task"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_its_line_and_field(tmp_path: Path, lines, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(write(tmp_path / "t.jsonl", lines), seed=0)


def test_a_file_that_is_no_parquet_is_told(tmp_path: Path):
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"t\.parquet: not a Parquet file"):
        load_tasks(str(tmp_path / "t.parquet"), seed=0)


def test_more_tasks_than_there_are_is_told_with_the_remedy(tmp_path: Path):
    tasks = load_tasks(write(tmp_path / "t.jsonl", DATA), seed=0)
    with pytest.raises(ConfigError, match=r"train\.batch_size is 6 and .* has 5 tasks; lower it, or add tasks"):
        tasks.of_round(1, 6)
    with pytest.raises(ConfigError, match=r"eval\.prompts is 64 and .* has 5 tasks"):
        tasks.check_enough(64, "eval.prompts")
    tasks.check_enough(5, "eval.prompts")


def test_a_function_makes_endless_tasks():
    tasks = load_tasks("unit.agents.made_up_tasks:doubled", seed=9)
    assert tasks.of_round(3, 2) == [
        Task(uid="6", data={"question": [6, {"seed": 9}]}),
        Task(uid="7", data={"question": [7, {"seed": 9}]}),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tasks.json", "it takes a .jsonl or .parquet file, a folder"),
        ("no_such.jsonl", "there is no such file; give its path from"),
        ("no.such.module:f", "there is no module no; run in its folder"),
        ("unit.agents.made_up_tasks:doublet", "has no doublet; is it doubled?"),
        ("unit.agents.made_up_tasks:NUMBER", "a int; it takes a function of"),
        ("unit.agents.made_up_tasks:", "it takes 'module:attribute'"),
    ],
)
def test_a_source_that_is_wrong_is_told(source, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(source, seed=0)


def test_a_function_that_returns_no_mapping_is_told():
    with pytest.raises(ConfigError, match=r"wrong\(4, 9\) returned a list; a task is a mapping"):
        load_tasks("unit.agents.made_up_tasks:wrong", seed=9).of_round(2, 2)


def test_a_function_of_other_arguments_makes_no_tasks():
    with pytest.raises(ConfigError, match=r"too many positional arguments; it takes a function of \(index, seed\)"):
        load_tasks("builtins:callable", seed=0)
