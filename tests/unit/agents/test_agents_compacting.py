"""The chat that compacts its context: limits, summaries, steps and pieces, with three kinds of chat templates."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from raggedright.agents.agent_session import Task
from raggedright.agents.chat import Chat
from raggedright.agents.compacting_chat import SUMMARY, CompactingChat
from raggedright.agents.load_agent import load_agent
from raggedright.agents.runner import Runner
from raggedright.config import load_config
from raggedright.errors import ConfigError
from raggedright.rollout.engine import EngineContext, Sampling
from raggedright.rollout.local_engine import LocalEngine
from raggedright.store.memory import MemoryStore
from raggedright.train.launch import check_plugins
from raggedright.train.round_prompts import load_prompts
from recorded import recorded_sessions
from unit.agents.scripted import ScriptEngine, causes, rows, run, settings
from unit.agents.test_agents_chat import CHAT, ids, tool_tokenizer

HERE = "unit.agents.made_up_tasks"
CHATML = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
ALTERNATING = """
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- if m.role == 'user' -%}[INST] {{ m.content | trim }} [/INST]
{%- else -%}{{ m.content | trim }}<|im_end|>{%- endif -%}
{%- endfor -%}
"""
NO_SYSTEM = """
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>model
{% endif -%}
"""
LEAVES_SYSTEM_OUT = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}" + CHATML
TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "no system": NO_SYSTEM, "left out": LEAVES_SYSTEM_OUT}
STOP = Sampling(max_tokens=64, stop_ids=frozenset(ids("<|im_end|>")))
NUMBERS = " ".join(map(str, range(100, 180)))


def tokenizer_of(template: str):
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def options(**changes):
    sizes = {"max_tokens": 12, "summary_tokens": 16, "context_tokens": 160, "summary_request": "Sum up."}
    return {"reward": f"{HERE}:exact", **sizes, **changes}


def play(replies, data, template="chatml", *, row_tokens=2_000, **changes):
    """The session of an agent to which a model gives these replies."""
    engine = ScriptEngine(*(ids(f"{reply}<|im_end|>") for reply in replies))
    task = Task(uid="p", data=data)
    agent = CompactingChat(**options(**changes))
    store = run(
        agent,
        [(task, 0)],
        engine=engine,
        tokenizer=tokenizer_of(template),
        sampling=STOP,
        max_row_tokens=row_tokens,
        timeout=60.0,
    )
    return store, engine


def texts(store) -> list[str]:
    return [str(CHAT.decode(row["input_ids"])) for row in rows(store)]


def trained(store) -> list[str]:
    """The tokens with loss of each row, as text."""
    found = []
    for row in rows(store):
        response = row["input_ids"][-len(row["response_mask"]) :]
        found.append(CHAT.decode([i for i, loss in zip(response, row["response_mask"], strict=True) if loss]))
    return found


def test_the_agent_has_a_short_name():
    assert isinstance(load_agent("compacting_chat", options()), CompactingChat)


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_fits_is_one_trajectory_as_chat_would_have_it(template):
    data = {"question": "Is it sunny?", "answer": "Yes."}
    store, engine = play(["Yes."], data, template, system="Be brief.")
    (entry,) = recorded_sessions(store)
    assert (entry.score, entry.cause, len(entry.trajectories)) == (1.0, "", 1)
    assert entry.metrics == {"steps": 1, "summaries": 0}
    plain = run(
        Chat(reward=f"{HERE}:exact", system="Be brief."),
        [(Task(uid="p", data=data), 0)],
        engine=ScriptEngine(ids("Yes.<|im_end|>")),
        tokenizer=tokenizer_of(template),
        sampling=STOP,
        max_row_tokens=2_000,
    )
    assert rows(store) == rows(plain)
    assert texts(store)[0].count("Be brief.") == 1
    assert engine.requests[0].sampling.max_tokens == 12


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_full_context_ends_with_a_summary_and_a_fresh_one_has_it(template):
    data = {"question": "Guess a number.", "answer": "?"}
    changes = {"step": f"{HERE}:ask_again", "max_steps": 6, "context_tokens": 150, "system": "Play."}
    store, _ = play(map(str, range(10, 90)), data, template, **changes)
    assert not causes(store)
    (entry,) = recorded_sessions(store)
    *before, last = found = texts(store)
    replies = [text.removesuffix("<|im_end|>").split("<|im_end|>") for text in trained(store)]
    assert [number for row in replies for number in row] == [*map(str, range(10, 10 + 6 + len(before)))]
    assert before
    assert entry.metrics == {"steps": 6, "summaries": len(before)}
    assert "Sum up." not in last
    for text, (*_, summary), following in zip(before, replies, found[1:], strict=False):
        assert text.index("Sum up.") < text.index(summary)
        assert f"Guess a number.\n\n{SUMMARY} {summary}\n\nNo, try again." in following
    assert all(text.count("Play.") == text.count("Guess a number.") == 1 for text in found)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_task_that_does_not_fit_is_read_in_pieces_with_the_summary_so_far(template):
    replies = [f"sum {i}" for i in range(40)]
    store, _ = play(replies, {"prompt": NUMBERS, "answer": "?"}, template, system="Add.", max_tokens=8)
    assert not causes(store)
    (entry,) = recorded_sessions(store)
    found = texts(store)
    assert len(found) == entry.metrics["summaries"] + 1 >= 3
    words = re.findall(r"\b1\d\d\b", "".join(found))
    assert words == NUMBERS.split()
    for i, text in enumerate(found):
        assert (f"{SUMMARY} sum {i - 1}" in text) == (i > 0)
        assert ("Sum up." in text) == (i < len(found) - 1)
        assert text.count("Add.") == 1
    assert trained(store) == [f"sum {i}<|im_end|>" for i in range(len(found))]


def test_a_document_is_read_in_pieces_and_the_question_is_repeated():
    data = {"question": "What is the largest?", "pages": [NUMBERS, "999"], "answer": "?"}
    store, _ = play(["179"] * 40, data, document="pages")
    found = texts(store)
    assert all(text.count("What is the largest?") == 1 for text in found)
    assert re.findall(r"\b1\d\d\b", "".join(found).replace("179<|im_end|>", "").replace(f"{SUMMARY} 179", "")) == [
        *NUMBERS.split()
    ]
    assert "999" in found[-1]


def test_text_without_spaces_is_cut_inside():
    store, _ = play(["so"] * 60, {"question": "x" * 400, "answer": "?"})
    assert not causes(store)
    assert sum(text.count("x") for text in texts(store)) == 400


@given(
    context=st.integers(120, 260),
    max_tokens=st.integers(1, 30),
    summary_tokens=st.integers(1, 30),
    max_steps=st.integers(1, 6),
    words=st.integers(1, 60),
    template=st.sampled_from([*TEMPLATES]),
    replies=st.lists(st.text("ab 12", max_size=60), min_size=1, max_size=8),
    ends=st.booleans(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_no_context_passes_the_limit_and_every_reply_is_trained_once(
    context, max_tokens, summary_tokens, max_steps, words, template, replies, ends
):
    """Replies of any length, which end their turn or are cut by their limit."""
    question = " ".join(NUMBERS.split()[:words])
    given_ids = [ids(reply + ("<|im_end|>" if ends else "")) or ids("a") for reply in replies]
    engine = ScriptEngine(*(given_ids * 200)[:200])
    agent = CompactingChat(
        **options(
            context_tokens=context,
            max_tokens=max_tokens,
            summary_tokens=summary_tokens,
            max_steps=max_steps,
            step=f"{HERE}:ask_again",
        )
    )
    task = Task(uid="p", data={"question": question, "answer": ""})
    store = run(
        agent,
        [(task, 0)],
        engine=engine,
        tokenizer=tokenizer_of(template),
        sampling=STOP,
        max_row_tokens=999,
        timeout=60.0,
    )
    (entry,) = recorded_sessions(store)
    assert all(len(row["input_ids"]) <= context for row in rows(store))
    if entry.cause:
        assert "agent.options.context_tokens" in entry.cause
        return
    num_generations = sum(row.generations for row in entry.trajectories)
    assert entry.metrics["steps"] == max_steps
    assert num_generations == max_steps + entry.metrics["summaries"]
    assert len(entry.trajectories) == entry.metrics["summaries"] + 1
    num_sampled = sum(
        min(len(reply), request.sampling.max_tokens)
        for reply, request in zip((given_ids * 200)[:200], engine.requests, strict=False)
    )
    assert sum(row.loss_tokens for row in entry.trajectories) == num_sampled


@pytest.mark.parametrize(("step", "steps"), [("ask_again", 3), ("ask_once", 2), ("ask_later", 2), ("never", 1)])
def test_the_environment_or_the_step_limit_ends_the_chat(step, steps):
    replies = ["a", "b", "c", "d"][:steps]
    store, _ = play(replies, {"question": "?", "answer": replies[-1]}, step=f"{HERE}:{step}", max_steps=3)
    (entry,) = recorded_sessions(store)
    assert (entry.cause, entry.score, entry.metrics["steps"]) == ("", 1.0, steps)


def test_the_environment_sees_the_whole_chat_without_summaries():
    replies = ["one one one", "two two two", "summary", "three"]
    store, _ = play(
        replies, {"question": "Count.", "answer": "3"}, step=f"{HERE}:told_so_far", max_steps=3, context_tokens=110
    )
    assert not causes(store)
    assert len(rows(store)) == 2
    assert "user:Count.|assistant:one one one|user:next|assistant:two two two" in texts(store)[1].replace("\n", "")


@pytest.mark.parametrize(("summary", "shown"), [("", "(empty)"), ("  ", "(empty)"), ("<think>hm</think> 5", "5")])
def test_an_empty_summary_is_said_to_be_empty_and_thoughts_are_left_out(summary, shown):
    store, _ = play([summary, *["x"] * 40], {"question": NUMBERS, "answer": "?"})
    assert not causes(store)
    assert f"{SUMMARY} {shown}\n" in texts(store)[1]


def test_a_summary_that_is_too_long_is_cut():
    store, engine = play(["word " * 40] * 40, {"question": NUMBERS, "answer": "?"})
    assert not causes(store)
    assert engine.requests[0].sampling.max_tokens == 16
    first, second = rows(store)[:2]
    kept = str(CHAT.decode(first["input_ids"][-16:])).strip()
    assert f"{SUMMARY} {kept}\n" in CHAT.decode(second["input_ids"])


def test_without_a_limit_of_its_own_a_context_has_the_tokens_of_a_row():
    store, _ = play(["x"] * 40, {"question": NUMBERS, "answer": "?"}, context_tokens=None, row_tokens=150)
    assert not causes(store)
    assert len(rows(store)) > 2
    assert max(len(row["input_ids"]) for row in rows(store)) <= 150


@pytest.mark.parametrize(
    ("data", "changes", "cause"),
    [
        ({"text": "?"}, {}, "task p has no messages, no prompt and no question; its fields are text"),
        ({"question": "?"}, {"column": "ask"}, "task p has no ask; its fields are question"),
        ({"messages": [{"role": "assistant", "content": "?"}]}, {}, "its last message must be a user's text"),
        ({"question": "?", "pages": 3}, {"document": "pages"}, "task p: field pages is 3; it takes text, or a list"),
        ({"question": "?"}, {"step": f"{HERE}:wrong_step"}, "agent.options.step returned a int"),
        ({"question": "?"}, {"step": f"{HERE}:failing_step"}, "ZeroDivisionError"),
        ({"question": NUMBERS}, {"system": "x y " * 80}, "raise agent.options.context_tokens"),
    ],
)
def test_what_cannot_be_played_fails_the_session_with_its_cause(data, changes, cause):
    store, _ = play(["x"] * 40, data, **changes)
    assert cause in causes(store)["p", 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, r"agent\.options\.max_steps is 0"),
        ({"max_tokens": True}, r"agent\.options\.max_tokens is True"),
        ({"summary_tokens": "9"}, r"agent\.options\.summary_tokens is '9'"),
        ({"context_tokens": 2.5}, r"agent\.options\.context_tokens is 2\.5"),
        ({"context_tokens": 28}, r"agent\.options\.context_tokens is 28 and max_tokens \+ summary_tokens is 28"),
        ({"step": f"{HERE}:NUMBER"}, r"agent\.options\.step is .*cannot be called"),
        ({"step": f"{HERE}:ask_agian"}, r"agent\.options\.step is .* is it ask_again"),
        ({"answer": "all"}, r"agent\.options\.answer is 'all'; it takes whole, last_line, tag"),
        ({"context_token": 1}, r"agent\.options\.context_token is unknown to compacting_chat; is it context_tokens"),
    ],
)
def test_options_that_are_wrong_are_told(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_agent("compacting_chat", options(**changes))


@pytest.mark.parametrize(
    ("answer", "reply", "score"),
    [
        ("whole", " 12 \n", 1.0),
        ("whole", "It is 12.", 2 / 9),
        ("last_line", "I add.\n12", 1.0),
        ("tag", "So <answer>11</answer>, no: <answer> 12 </answer>", 1.0),
        ("tag", "12", 0.0),
    ],
)
def test_reasoning_gyms_verifier_scores_the_answer_in_a_reply(answer, reply, score):
    data = {"question": "5 + 7 =", "answer": "12", "reasoning_gym": {"dataset": "chain_sum"}, "metadata": {}}
    store, _ = play([reply], data, reward="reasoning_gym", answer=answer, max_tokens=60)
    (entry,) = recorded_sessions(store)
    assert entry.score == pytest.approx(score)
    assert entry.metrics["exact_match"] == float(score == 1)
    assert entry.metrics["answered"] == float(score > 0)


def test_a_reply_that_a_verifier_fails_on_scores_nothing():
    data = {"question": "?", "answer": "2 x 3", "reasoning_gym": {"dataset": "prime_factorization"}, "metadata": {}}
    (entry,) = recorded_sessions(play(["not a product"], data, reward="reasoning_gym")[0])
    assert (entry.score, entry.cause) == (0.0, "")


def test_a_real_model_compacts_the_same_way_in_any_company():
    tokenizer = tokenizer_of("no system")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.to(torch.float64).eval()  # type: ignore[arg-type]
    engine = LocalEngine(EngineContext(model=model, pad_token_id=tokenizer.pad_token_id))  # type: ignore[arg-type]
    agent = CompactingChat(**options(step=f"{HERE}:ask_again", max_steps=3, system="Add."))
    tasks = [
        Task(uid=str(i), data={"question": " ".join(NUMBERS.split()[: 9 * i + 1]), "answer": "?"}) for i in range(6)
    ]
    found = []
    for concurrency in (100, 2):
        store = MemoryStore()
        chosen = settings(sampling=STOP, max_row_tokens=200, concurrency=concurrency, timeout=60.0)
        runner = Runner(agent=agent, engine=engine, tokenizer=tokenizer, settings=chosen)
        runner.run(store, round=1, sessions=[(task, s) for task in tasks for s in range(2)])
        assert not causes(store)
        found.append([row["input_ids"] for row in rows(store)])
    assert found[0] == found[1]
    assert max(map(len, found[0])) <= 160
    assert len({len(entry.trajectories) for entry in recorded_sessions(store)}) > 2


def test_counting_tokens_says_what_a_trajectory_will_have_and_changes_nothing():
    seen = []

    async def agent(task, session):
        user = [{"role": "user", "content": "Is it sunny?"}]
        counted = session.count_tokens(user)
        chat = session.trajectory(user)
        await chat.generate()
        before = chat.ids
        added, added_text = chat.count_tokens(user), chat.count_tokens("and")
        assert chat.ids == before
        chat.observe(user)
        seen.append((counted, session.count_tokens("Is it?"), added, added_text))
        assert len(chat.ids) == len(before) + added
        assert session.count_tokens("word " * 10_000) > session.max_row_tokens == 2_000
        return 1.0

    engine = ScriptEngine(ids("Yes.<|im_end|>"))
    store = run(
        agent, [(Task(uid="p", data={}), 0)], engine=engine, tokenizer=CHAT, sampling=STOP, max_row_tokens=2_000
    )
    assert not causes(store)
    (entry,) = recorded_sessions(store)
    assert seen == [(entry.trajectories[0].prompt_tokens, len(ids("Is it?")), seen[0][2], len(ids("and")))]


@pytest.mark.parametrize("template", TEMPLATES)
def test_examples_are_earlier_turns_of_every_trajectory(template):
    shown = {"examples": [["1 2", "3"]], "system": "Add."}
    store, _ = play(["9"] * 40, {"question": NUMBERS, "answer": "?"}, template, **shown)
    assert not causes(store)
    found = texts(store)
    assert len(found) > 2
    plain = Chat(reward=f"{HERE}:exact", **shown)
    task = Task(uid="p", data={"question": "4", "answer": "?"})
    engine, tokenizer = ScriptEngine(ids("4<|im_end|>")), tokenizer_of(template)
    (single,) = texts(run(plain, [(task, 0)], engine=engine, tokenizer=tokenizer, sampling=STOP, max_row_tokens=2_000))
    beginning = single[: single.index("3<|im_end|>")]
    assert "Add." in beginning
    assert all(text.startswith(beginning) for text in found)
    assert not any("3<|im_end|>" in text for text in trained(store))


@pytest.mark.parametrize("examples", [["1 2"], [["1 2"]], [["1", "2", "3"]], [["1", 2]]])
def test_examples_that_are_no_pairs_are_told(examples):
    with pytest.raises(ConfigError, match=r"agent\.options\.examples: number 0 is"):
        load_agent("chat", {"reward": f"{HERE}:exact", "examples": examples})


def test_a_context_without_room_for_two_summaries_fails_before_it_reads_a_piece():
    """Whether a session fails must not depend on the length of the summaries that it writes."""
    for replies in (["x"] * 40, ["long words " * 9] * 40):
        store, engine = play(replies, {"question": NUMBERS, "answer": "?"}, context_tokens=70, summary_tokens=30)
        assert "agent.options.context_tokens" in causes(store)["p", 0, 0]
        assert not engine.requests


def test_the_config_of_the_example_has_tasks_and_an_agent():
    config = load_config(Path(__file__).parents[3] / "configs" / "reasoning_gym.toml")
    check_plugins(config)
    prompts, eval_tasks = load_prompts(config)
    questions = [{task.data["question"] for task in tasks.of_round(1, 32)} for tasks in (prompts.tasks, eval_tasks)]
    assert not questions[0] & questions[1]
