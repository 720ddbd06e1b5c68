"""The agents in the docs run as they stand there, in thirty lines each."""

import re
import sys
from pathlib import Path
from types import ModuleType

from raggedright.agents import Task
from raggedright.agents.compacting_chat import CompactingChat
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
    agent = run_code(2)["ask_tools"]
    store = run(agent, [(task, 0)], engine=engine, tokenizer=CHAT, sampling=sampling, max_row_tokens=2_000)
    (entry,) = recorded_sessions(store)
    assert (entry.cause, entry.score) == ("", 1.0)
    context = CHAT.decode([*engine.requests[1].ids])
    assert "<tool_response>\nIt is sunny in Bonn.\n</tool_response>" in context


def test_the_game_of_the_page_is_played_with_compaction():
    names = run_code(1)
    sys.modules["game_of_the_page"] = ModuleType("game_of_the_page")
    vars(sys.modules["game_of_the_page"]).update(names)
    options = {"reward": "game_of_the_page:score", "step": "game_of_the_page:step", "max_steps": 10}
    agent = CompactingChat(**options, context_tokens=160, max_tokens=8, summary_tokens=24, summary_request="Sum up.")
    engine = ScriptEngine(*(ids(f"{reply}<|im_end|>") for reply in ("x", "3", "9", "Not 3 or 9.", "7")))
    sampling = Sampling(max_tokens=64, stop_ids=frozenset(ids("<|im_end|>")))
    task = Task(uid="p", data={"question": "Guess a number.", "number": 7})
    store = run(agent, [(task, 0)], engine=engine, tokenizer=CHAT, sampling=sampling, max_row_tokens=2_000)
    (entry,) = recorded_sessions(store)
    assert (entry.cause, entry.score, entry.metrics) == ("", 1.0, {"steps": 4, "summaries": 1})
    context = CHAT.decode([*engine.requests[-1].ids])
    assert "Not 3 or 9.\n\nIt is smaller." in context
