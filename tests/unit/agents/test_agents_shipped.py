"""The shipped agents: what they ask, when they stop, what they score, and that they run with a real model."""

import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from raggedright.agents import digits
from raggedright.agents.agent_session import Task
from raggedright.agents.chat import Chat
from raggedright.agents.digits import compact, delegate
from raggedright.agents.runner import Runner
from raggedright.rollout.engine import EngineContext, Generation
from raggedright.rollout.local_engine import LocalEngine
from raggedright.store.memory import MemoryStore
from recorded import recorded_sessions
from unit.agents.scripted import EOS, TOKENIZER, NoiseEngine, ScriptEngine, causes, rows, run, settings
from unit.agents.test_agents_session import CHAT, ids

HERE = "unit.agents.made_up_tasks"


class Oracle(NoiseEngine):
    """Answers with the largest digit of the context."""

    async def generate(self, request):
        self.requests.append(request)
        largest = max(i for i in request.ids if i < 10)
        return Generation([largest, EOS], [-0.1, -0.1], "stop", 0)


def made(num_prompts=20, n=4):
    return [(Task(uid=str(i), data=digits.tasks(i, 5)), s) for i in range(num_prompts) for s in range(n)]


def prompts(store) -> list[str]:
    return [
        "".join(TOKENIZER.convert_ids_to_tokens(row["input_ids"][: -len(row["response_mask"])])) for row in rows(store)
    ]


@pytest.mark.parametrize(("agent", "most"), [(compact, 4), (delegate, 3)])
def test_right_answers_score_one_and_groups_stay_ragged(agent, most):
    store = run(agent, made(), engine=Oracle())
    entries = recorded_sessions(store)
    assert {entry.score for entry in entries} == {1.0}
    assert all(entry.metrics["exact_match"] == 1.0 for entry in entries)
    counts = [len(entry.trajectories) for entry in entries]
    assert {*range(1, most + 1)} == {*counts}
    ragged = sum(len({len(e.trajectories) for e in entries if e.key.prompt == str(i)}) > 1 for i in range(20))
    assert ragged >= 12


@pytest.mark.parametrize("session", range(8))
def test_compaction_carries_its_memory_into_a_fresh_context(session):
    task = Task(uid="p", data={"digits": [3, 1, 4, 1]})
    found = prompts(run(compact, [(task, session)], engine=Oracle()))
    assert "".join(prompt[2:-1] for prompt in found) == "3141"
    seen = ""
    for prompt in found:
        assert prompt[:2] + prompt[-1] == f"{max(seen, default='-')}:="
        seen += prompt[2:-1]


@pytest.mark.parametrize("reply", [[4], [EOS], [4, 4], [4, 10], [10, EOS]])
def test_a_malformed_memory_ends_the_session(reply):
    task = Task(uid="p", data={"digits": [*"3141592"]})
    (entry,) = recorded_sessions(run(compact, [(task, 0)], engine=ScriptEngine([3, EOS], reply)))
    assert (entry.score, len(entry.trajectories)) == (0.0, 2)
    assert entry.metrics["exact_match"] == 0.0


def test_form_alone_scores_a_tenth():
    task = Task(uid="p", data={"digits": [*"31"]})
    (entry,) = recorded_sessions(run(compact, [(task, 0)], engine=ScriptEngine(*[[2, EOS]] * 4)))
    assert entry.score == pytest.approx(0.1)


def test_delegation_reports_to_the_main_agent():
    task = Task(uid="p", data={"digits": [*"3141592"]})
    store = run(delegate, [(task, 0)], engine=Oracle())
    (entry,) = recorded_sessions(store)
    assert [row.role for row in entry.trajectories] == ["sub-agent", "sub-agent", "main"]
    first, second, main = prompts(store)
    reports, own = main[:-1].split(":")
    assert own + first[2:-1] + second[2:-1] == "3141592"
    assert reports == max(first[2:-1]) + max(second[2:-1])


def test_chunks_have_one_to_three_digits_and_every_cut_can_come():
    draw = random.Random(0)
    found = {tuple(map(len, digits.cut([*"31415"], draw, max_chunks=4))) for _ in range(2_000)}
    assert found == {sizes for k in range(1, 5) for sizes in _compositions(5, k) if max(sizes) <= 3}


def _compositions(total: int, parts: int):
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total) for rest in _compositions(total - first, parts - 1)]


def test_tasks_depend_on_index_and_seed_alone():
    assert [digits.tasks(i, 1) for i in range(50)] == [digits.tasks(i, 1) for i in range(50)]
    assert [digits.tasks(i, 1) for i in range(50)] != [digits.tasks(i, 2) for i in range(50)]
    assert len(digits.SYMBOLS) <= 16


@pytest.mark.parametrize("reward", ["exact", "later"])
def test_chat_scores_its_reply_by_a_function_of_the_users(reward):
    agent = Chat(reward=f"{HERE}:{reward}", system="be kind", max_tokens=4)
    given = [
        Task(uid="a", data={"prompt": "say hi", "answer": "hi"}),
        Task(uid="b", data={"messages": [{"role": "user", "content": "say no"}], "answer": "yes"}),
        Task(uid="c", data={"answer": "yes"}),
    ]
    replies = ScriptEngine(ids("hi<eos>"), ids("no<eos>"))
    store = run(agent, [(task, 0) for task in given], engine=replies, tokenizer=CHAT)
    assert [entry.score for entry in recorded_sessions(store)] == [1.0, 0.0, None]
    assert rows(store)[0]["input_ids"] == ids("<system>be kind;<user>say hi;<assistant>hi<eos>")
    assert causes(store)["c", 0, 0].startswith(
        "ValueError: task c has no messages, no prompt and no question; its fields are answer"
    )


@pytest.mark.parametrize("agent", [compact, delegate])
def test_a_real_model_generates_the_same_tokens_in_any_company(agent):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=64,
    )
    model = Qwen3ForCausalLM(config)
    model.to(torch.float64).eval()  # type: ignore[arg-type]
    engine = LocalEngine(EngineContext(model=model, pad_token_id=TOKENIZER.pad_token_id))  # type: ignore[arg-type]
    found = []
    for concurrency in (100, 3):
        store = MemoryStore()
        chosen = settings(concurrency=concurrency, timeout=60.0)
        runner = Runner(agent=agent, engine=engine, tokenizer=TOKENIZER, settings=chosen)
        for number in (1, 2):
            runner.run(store, round=number, sessions=made(8))
        assert not causes(store)
        found.append([row["input_ids"] for row in rows(store)])
    assert found[0] == found[1]
