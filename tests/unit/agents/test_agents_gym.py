"""Tasks and scores of reasoning-gym: what is made, what is held out, what is refused, what the verifiers say."""

import re
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import create_dataset

from raggedright.agents import gym_tasks
from raggedright.agents.agent_session import Task
from raggedright.agents.gym_tasks import VerifierError, is_held_out, verify
from raggedright.agents.task_sources import load_tasks
from raggedright.errors import ConfigError

SUMS = {"dataset": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def load(options=SUMS, seed=0, **changes):
    return load_tasks("reasoning_gym", seed=seed, options=options, **changes)


def questions(tasks: list[Task]) -> list[str]:
    return [str(task.data["question"]) for task in tasks]


def test_a_task_is_reasoning_gyms_entry_and_depends_on_seed_and_index_alone():
    first, again, other = load(), load(), load(seed=1)
    tasks = first.of_round(3, 4)
    assert tasks == again.of_round(3, 4)
    assert [task.uid for task in tasks] == ["12", "13", "14", "15"]
    assert questions(tasks) != questions(other.of_round(3, 4))
    for task in tasks:
        assert {"question", "answer", "metadata", "reasoning_gym"} == {*task.data}
        terms = re.findall(r"[-+]? ?\d+", str(task.data["question"]).partition(":")[2])
        assert sum(int(term.replace(" ", "")) for term in terms) == int(str(task.data["answer"]))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**62), eval_seed=st.integers(0, 2**62))
def test_no_question_of_an_evaluation_is_trained_on_whatever_the_seeds(seed, eval_seed):
    """Sums of two digits have 180 questions, so tasks of two seeds repeat each other many times over."""
    small = SUMS | {"max_terms": 2}
    trained = {*questions(load(small, seed).of_round(1, 400))}
    held_out = {*questions(load(small, eval_seed, held_out=True).of_round(1, 100))}
    assert not trained & held_out
    assert len(held_out) > 5
    assert len(trained) > 100


def test_neighbouring_seeds_have_other_tasks_although_reasoning_gyms_have_the_same():
    first, second = (create_dataset("chain_sum", seed=seed) for seed in (5, 6))
    assert first[1]["question"] == second[0]["question"]
    ours = [{*questions(load({"dataset": "chain_sum"}, seed).of_round(1, 100))} for seed in (5, 6)]
    assert not ours[0] & ours[1]


def test_one_in_eight_questions_is_held_out():
    share = sum(is_held_out(f"question {i}") for i in range(8_000)) / 8_000
    assert 0.11 < share < 0.14


@pytest.mark.parametrize("name", ["gsm_symbolic", "word_ladder", "list_functions", "pool_matrix", "letter_counting"])
def test_tasks_have_no_end_even_of_datasets_that_are_made_in_one_piece(name):
    (task,) = load({"dataset": name}, seed=2**62).of_round(100_000, 1)
    assert verify(task, str(task.data["answer"])) == 1


def test_a_mixture_of_datasets_is_one_too():
    parts = [{"name": "chain_sum", "weight": 1}, {"name": "gcd", "weight": 3, "config": {"max_value": 20}}]
    tasks = load({"dataset": "composite", "datasets": parts}).of_round(1, 40)
    sources = [str(task.data["metadata"]["source_dataset"]) for task in tasks]  # type: ignore[index]
    assert sources.count("gcd") > sources.count("chain_sum") > 0
    assert {verify(task, str(task.data["answer"])) for task in tasks} == {1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"prompts\.options\.dataset is missing; it has \d+, such as chain_sum"),
        ({"dataset": "chain_sums"}, r"prompts\.options\.dataset is 'chain_sums', .*; is it chain_sum"),
        ({"dataset": 3}, r"prompts\.options\.dataset is 3"),
        (SUMS | {"max_term": 3}, r"prompts\.options\.max_term is unknown to .*chain_sum; is it max_terms\?"),
        (SUMS | {"seed": 3}, r"prompts\.options\.seed is set"),
        (SUMS | {"size": 3}, r"prompts\.options\.size is set"),
        (SUMS | {"min_terms": 9}, r"prompts\.options does not fit .*chain_sum: AssertionError"),
        (SUMS | {"min_terms": "two"}, r"prompts\.options does not fit .*chain_sum: TypeError"),
        ({"dataset": "composite"}, r"prompts\.options does not fit .*composite: AssertionError"),
        (
            {"dataset": "composite", "datasets": [{"name": "chain_sum", "wight": 1}]},
            r"prompts\.options does not fit .*composite: TypeError.*wight",
        ),
    ],
)
def test_options_that_are_wrong_are_told_when_the_source_is_loaded(options, message):
    with pytest.raises(ConfigError, match=message):
        load(options)


@pytest.mark.parametrize(("number", "held_out"), [(1, False), (2, True)])
def test_a_dataset_with_one_question_lacks_it_in_one_of_the_two_parts(number: int, held_out: bool):
    one = {"dataset": "count_bits", "min_n": number, "max_n": number}
    load(one, held_out=not held_out).check_enough(4, "train.batch_size")
    tasks = load(one, held_out=held_out, options_key="prompts.eval_options")
    with pytest.raises(ConfigError, match=r"prompts\.eval_options: none of 128 tasks of reasoning_gym's count_bits"):
        tasks.check_enough(4, "eval.prompts")


def test_a_verifier_scores_with_the_options_of_its_task():
    task = Task(uid="0", data={**create_dataset("chain_sum", seed=1)[0], "reasoning_gym": {"dataset": "chain_sum"}})
    right = str(task.data["answer"])
    assert verify(task, right) == 1
    assert 0 < verify(task, f"The answer is {right}.") < 1
    assert verify(task, "no") == verify(task, None) == verify(task, "") == 0


def test_an_answer_on_which_a_verifier_fails_is_named():
    task = Task(uid="7", data=create_dataset("prime_factorization", seed=1)[0])
    with pytest.raises(VerifierError, match=r"task 7: .*prime_factorization"):
        verify(task, "two times three")


def test_a_file_of_reasoning_gyms_entries_can_be_verified_without_options():
    entry = create_dataset("gcd", seed=1)[0]
    assert verify(Task(uid="0", data=entry), str(entry["answer"])) == 1


@pytest.mark.parametrize("data", [{"question": "?"}, {"answer": "3"}, {"answer": "3", "metadata": {}}])
def test_a_task_of_another_source_cannot_be_verified(data):
    with pytest.raises(ValueError, match=r"task 7 is not of reasoning_gym.*prompts\.source"):
        verify(Task(uid="7", data=data), "3")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(gym_tasks, "find_spec", lambda name: None if name == "reasoning_gym" else find_spec(name))
    with pytest.raises(ConfigError, match=r"prompts\.source is reasoning_gym, which is not installed; .*\[tasks\]"):
        load()
