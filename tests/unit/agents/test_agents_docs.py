"""The agent in the docs runs as it stands there, in thirty lines."""

import re
from pathlib import Path

from raggedright.agents.session import Task
from unit.agents.scripted import EOS, ScriptEngine, run

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()


def test_the_agent_of_the_page_plays_and_is_recorded():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(code.splitlines()) <= 30
    names: dict = {}
    exec(code, names)
    engine = ScriptEngine([5, EOS], [13], [7, EOS], [13])
    store = run(names["Guess"](tries=3), [(Task(uid="p", data={"number": 7}), 0)], engine=engine)
    (entry,) = store.list()
    assert (entry.state, entry.cause, entry.score) == ("finished", "", 1.0)
    assert [(row.tags["role"], row.tags["reward"], row.tags["metric/attempts"]) for row in entry.rows] == [
        ("agent", None, 2.0),
        ("checker", 0.0, 2.0),
        ("checker", 1.0, 2.0),
    ]
    assert entry.rows[0].response_tokens == 5
    assert entry.rows[0].loss_tokens == 4
