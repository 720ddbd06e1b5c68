"""Agents by name: what is found, what it is made with, and what is told when it is not there."""

import sys
from pathlib import Path

import pytest

from raggedright.agents import digits
from raggedright.agents.chat import Chat
from raggedright.agents.load_agent import load_agent
from raggedright.errors import ConfigError
from unit.agents import made_up_tasks

HERE = "unit.agents.made_up_tasks"


def test_shipped_agents_have_short_names():
    assert load_agent("compaction", {}) is digits.compact
    assert load_agent("delegation", {}) is digits.delegate
    assert isinstance(load_agent("chat", {"reward": f"{HERE}:exact"}), Chat)


def test_a_function_is_the_agent_and_a_class_is_made_with_the_options():
    assert load_agent(f"{HERE}:plain_agent", {}) is made_up_tasks.plain_agent
    player = load_agent(f"{HERE}:Player", {"tries": 3, "hints": True})
    assert isinstance(player, made_up_tasks.Player)
    assert (player.tries, player.hints) == (3, True)


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch):
    (tmp_path / "agent_of_this_folder.py").write_text("async def play(task, session):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_agent("agent_of_this_folder:play", {}).__module__ == "agent_of_this_folder"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("compation", {}, "agent.name is 'compation', which does not exist; is it compaction?"),
        ("zzz", {}, "shipped are chat, compacting_chat, compaction, delegation, tiles; others are 'module:attribute'"),
        ("compaction", {"size": 3}, "agent.options are given and compaction is not a class; leave out size"),
        ("chat", {}, "agent.options.reward is missing; chat needs reward"),
        ("chat", {"reward": f"{HERE}:exact", "sytem": "x"}, "agent.options.sytem is unknown to chat; is it system?"),
        ("chat", {"reward": f"{HERE}:NUMBER"}, "which cannot be called; name a function"),
        ("chat", {"reward": f"{HERE}:exakt"}, "agent.options.reward is .* has no exakt; is it exact?"),
        (f"{HERE}:Player", {}, "agent.options.tries is missing"),
        (f"{HERE}:NUMBER", {}, "a int that cannot be called; give it an async __call__"),
        (f"{HERE}:not_async", {}, "which is not async; write it as `async def`"),
        (f"{HERE}:NotAsync", {}, "which is not async"),
    ],
)
def test_what_cannot_be_loaded_is_told(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_agent(name, options)
