"""The agents in the docs run as they stand there, in thirty lines each."""

import re
from pathlib import Path

from raggedright.agents import Task
from raggedright.rollout.engine import Sampling
from recorded import recorded_sessions
from unit.agents.scripted import EOS, ScriptEngine, run
from unit.agents.test_agents_chat import CALL, CHAT, ids

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()


def run_code(number: int) -> dict:
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[number]
    assert len(code.splitlines()) <= 35
    names: dict = {}
    exec(code, names)
    return names


def test_the_agent_of_the_page_plays_and_is_recorded():
    names = run_code(0)
    engine = ScriptEngine([5, EOS], [13], [7, EOS], [13])
    store = run(names["Guess"](tries=3), [(Task(uid="p", data={"number": 7}), 0)], engine=engine)
    (entry,) = recorded_sessions(store)
    assert (entry.state, entry.cause, entry.score) == ("finished", "", 1.0)
    assert [(row.role, row.reward, entry.metrics["attempts"]) for row in entry.trajectories] == [
        ("agent", None, 2.0),
        ("checker", 0.0, 2.0),
        ("checker", 1.0, 2.0),
    ]
    assert entry.trajectories[0].response_tokens == 5
    assert entry.trajectories[0].loss_tokens == 4


def test_the_agent_with_a_tool_calls_it_and_answers():
    engine = ScriptEngine(ids(f"{CALL}<|im_end|>"), ids("It is sunny.<|im_end|>"))
    sampling = Sampling(max_tokens=64, stop_ids=frozenset(ids("<|im_end|>")))
    task = Task(uid="p", data={"question": "How is the weather in Bonn?", "answer": "sunny"})
    agent = run_code(1)["ask_tools"]
    store = run(agent, [(task, 0)], engine=engine, tokenizer=CHAT, sampling=sampling, max_row_tokens=2_000)
    (entry,) = recorded_sessions(store)
    assert (entry.cause, entry.score) == ("", 1.0)
    context = CHAT.decode([*engine.requests[1].ids])
    assert "<tool_response>\nIt is sunny in Bonn.\n</tool_response>" in context
