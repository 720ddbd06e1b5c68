"""Chats with tools, template settings, parts and temperatures, on a byte-level tokenizer with a tool template."""

import json

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.tokens import _REPLY, decode
from raggedright.rollout.engine import Sampling
from recorded import recorded_sessions
from unit.agents.scripted import ScriptEngine, causes, rows, run, tasks_of

# As Qwen and Hermes do: tools are listed in the system turn, calls are JSON between marks, results are in a user turn.
TEMPLATE = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif -%}
Functions that you may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif -%}
"""
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text", "close": ["<|im_end|>"], "optional": True},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "optional": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges of its own, whose marks of tool calls are tokens that text shows."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEMPLATE, json.dumps(RESPONSES)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})  # type: ignore[dict-item]
    made.add_tokens(MARKS)
    made.chat_template = TEMPLATE
    return made


CHAT = tool_tokenizer()
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it sunny in Bonn?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
RESULTS = [{"role": "tool", "content": '{"sky": "clear"}'}, {"role": "tool", "content": "23 C"}]


def ids(text: str) -> list[int]:
    return CHAT.encode(text, add_special_tokens=False)


def rendered(messages: list[dict], **arguments) -> str:
    text = CHAT.apply_chat_template(messages, tokenize=False, **arguments)
    assert isinstance(text, str)
    return text


def run_one(agent, *replies: str, **changes):
    engine = ScriptEngine(*(ids(reply) for reply in replies))
    sampling = Sampling(max_tokens=64, stop_ids=frozenset(ids("<|im_end|>")), temperature=0.5)
    options = {"sampling": sampling, "max_row_tokens": 2_000, "tokenizer": CHAT, "timeout": 10.0, **changes}
    return run(agent, [(tasks_of("p")[0], 0)], engine=engine, **options), engine


def test_a_chat_with_tools_has_the_tokens_of_its_template():
    async def agent(task: Task, session: Session) -> float:
        chat = session.trajectory([SYSTEM, USER], tools=[TOOL])
        reply = await chat.generate()
        assert reply.text == CALL
        chat.observe(RESULTS)
        await chat.generate()
        return 1.0

    store, _ = run_one(agent, f"{CALL}<|im_end|>", "Yes.<|im_end|>")
    assert not causes(store)
    (row,) = rows(store)
    called = {"role": "assistant", "tool_calls": [{"function": json.loads(CALL.split("\n")[1])}], "content": ""}
    talk = [SYSTEM, USER, called, *RESULTS, {"role": "assistant", "content": "Yes."}]
    whole = rendered(talk, tools=[TOOL])
    assert '"name": "weather", "description": "The weather of a city."' in whole
    # The template puts a line between content and a call; the model, which had no content, did not generate it.
    assert row["input_ids"] == ids(whole.replace("assistant\n\n<tool_call>", "assistant\n<tool_call>").rstrip("\n"))
    answer = ids("Yes.<|im_end|>")
    assert row["response_mask"][: len(ids(CALL)) + 1] == [1] * (len(ids(CALL)) + 1)
    assert row["response_mask"][-len(answer) - 1 :] == [0] + [1] * len(answer)


def test_a_function_with_type_hints_is_a_tool():
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Where.
        """
        return city

    async def agent(task, session):
        session.trajectory([USER], tools=[weather])
        return 1.0

    (row,) = rows(run_one(agent)[0])
    assert '"description": "Where."' in CHAT.decode(row["input_ids"])


def test_no_tools_may_be_none_as_in_clients_of_chat_endpoints():
    async def agent(task, session):
        session.trajectory([USER], tools=None)
        session.trajectory([USER], tools=[])
        session.trajectory([USER])
        return 1.0

    found = [row["input_ids"] for row in rows(run_one(agent)[0])]
    assert found[0] == found[1] == found[2]


def test_settings_of_the_template_hold_in_every_turn():
    async def agent(task, session):
        chat = session.trajectory([USER], chat_template_kwargs={"enable_thinking": False})
        await chat.generate()
        chat.observe([USER])
        return 1.0

    (row,) = rows(run_one(agent, "Hm.<|im_end|>")[0])
    talk = [USER, {"role": "assistant", "content": "Hm."}, USER]
    closed = "<think>\n\n</think>\n\n"
    whole = rendered(talk, add_generation_prompt=True, enable_thinking=False)
    assert whole.endswith(closed)
    first, second = whole.split("Hm.")
    assert row["input_ids"] == ids(f"{first}{closed}Hm.{second}")


def test_messages_may_have_no_content_or_content_in_parts():
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    parts = [{"type": "text", "text": "Is it sunny "}, {"type": "text", "text": "in Bonn?"}]

    async def agent(task, session):
        for content in ({}, {"content": None}, {"content": ""}):
            called = {"role": "assistant", "tool_calls": [call], **content}
            session.trajectory([{"role": "user", "content": parts}, called, *RESULTS])
        return 1.0

    store, _ = run_one(agent)
    assert not causes(store)
    first, *others = (row["input_ids"] for row in rows(store))
    called = {"role": "assistant", "tool_calls": [call], "content": ""}
    assert first == ids(rendered([USER, called, *RESULTS], add_generation_prompt=True))
    assert others == [first, first]


def test_a_reply_is_parsed_into_a_message_where_the_tokenizer_can():
    tokenizer = tool_tokenizer()
    tokenizer.response_template = RESPONSES
    seen = []

    async def agent(task, session):
        chat = session.trajectory([USER], tools=[TOOL])
        for _ in range(3):
            seen.append((await chat.generate()).message)
            chat.observe([USER])
        return 1.0

    replies = f"Let me see. {CALL}<|im_end|>", "Yes.<|im_end|>", "<tool_call>no JSON</tool_call><|im_end|>"
    store, _ = run_one(agent, *replies, tokenizer=tokenizer)
    assert not causes(store)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    assert seen[0]["tool_calls"] == [call]
    assert seen[0]["content"].strip() == "Let me see."
    assert seen[1] == {"role": "assistant", "content": "Yes."}
    assert seen[2] is None


def test_without_a_response_template_a_reply_is_text_alone():
    async def agent(task, session):
        assert (await session.trajectory([USER], tools=[TOOL]).generate()).message is None
        return 1.0

    assert not causes(run_one(agent, f"{CALL}<|im_end|>")[0])


def test_what_is_observed_is_whole_even_if_it_has_the_marker_of_a_reply():
    said = f"before {_REPLY} after"
    tokens = []

    async def agent(task, session):
        chat = session.trajectory([USER])
        await chat.generate()
        chat.observe([{"role": "user", "content": said}])
        tokens.extend(chat.ids)
        return 1.0

    assert not causes(run_one(agent, "Yes.<|im_end|>")[0])
    assert said in decode(tool_tokenizer(), tokens)


_AGAIN = "{% if loop.previtem is defined and '!' in loop.previtem.content %} again{% endif %}"
REWRITES = f"{_AGAIN}<|im_end|>".join(TEMPLATE.rsplit("<|im_end|>", 1))


def test_a_template_whose_next_turn_depends_on_the_reply_is_refused():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = REWRITES

    async def agent(task, session):
        chat = session.trajectory([USER])
        for _ in range(2):
            await chat.generate()
            chat.observe([USER])
        return 1.0

    store, _ = run_one(agent, "Yes.<|im_end|>", "No!<|im_end|>", tokenizer=tokenizer)
    refused = "row p/0/0: the chat template writes what follows a reply differently after this one, 'No!'"
    assert refused in causes(store)["p", 0, 0]


PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


@pytest.mark.parametrize(
    ("template", "use", "cause"),
    [
        (PLAIN, lambda s: s.trajectory([USER], tools=[TOOL]), "1 tools are given and the tokenizer's chat template"),
        (PLAIN, lambda s: s.trajectory([{"role": "assistant", "tool_calls": [{}]}]), "message 0 has tool_calls, which"),
        (
            PLAIN,
            lambda s: s.trajectory([USER], chat_template_kwargs={"enable_thinking": False}),
            "chat_template_kwargs has enable_thinking, which the tokenizer's chat template does not read",
        ),
        (
            TEMPLATE,  # which has </think>, <think> and enable_thinking
            lambda s: s.trajectory([USER], chat_template_kwargs={"think": True}),
            "chat_template_kwargs has think, which the tokenizer's chat template does not read",
        ),
        (
            "{{ my_tools }}" + PLAIN,
            lambda s: s.trajectory([USER], tools=[TOOL]),
            "1 tools are given and the tokenizer's chat template",
        ),
        (
            TEMPLATE,
            lambda s: s.trajectory([USER], chat_template_kwargs={"add_generation_prompt": False}),
            "chat_template_kwargs has add_generation_prompt, which is not a setting",
        ),
        (TEMPLATE, lambda s: s.trajectory("hello", tools=[TOOL]), "tools or chat_template_kwargs are given and the"),
        (TEMPLATE, lambda s: s.trajectory([{"role": "user", "content": {"a": 1}}]), "message 0: content is {'a': 1}"),
        (
            TEMPLATE,
            lambda s: s.trajectory([{"role": "user", "content": [{"type": "audio"}]}]),
            "message 0: a part is {'type': 'audio'}; the model takes text only",
        ),
        ("{{ raise_exception('no system') }}", lambda s: s.trajectory([USER]), "fails on the messages: TemplateError"),
    ],
)
def test_what_a_template_cannot_write_is_told(template: str, use, cause: str):
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template

    async def agent(task, session):
        use(session)

    assert cause in causes(run_one(agent, tokenizer=tokenizer)[0])["p", 0, 0]


def test_a_generation_has_a_temperature_of_its_own_and_the_row_says_which():
    async def agent(task, session):
        chat = session.trajectory("ab")
        await chat.generate()
        chat.observe([1])
        await chat.generate(temperature=2)
        await chat.generate(temperature=0)
        plain = session.trajectory("ab")
        await plain.generate(temperature=0.5)
        await plain.generate(temperature=0)
        return 1.0

    store, engine = run_one(agent, "a", "b", "c", "d", "e")
    assert [request.sampling.temperature for request in engine.requests] == [0.5, 2.0, 0.0, 0.5, 0.0]
    (entry,) = recorded_sessions(store)
    own, plain = entry.trajectories
    assert own.response_mask.tolist() == [1, 0, 1, 0]
    assert own.extra["rollout_temperatures"].tolist() == [0.5, 0.5, 2.0, 0.5]
    assert "rollout_temperatures" not in plain.extra
    assert plain.response_mask.tolist() == [1, 0]


def test_a_greedy_evaluation_is_greedy_whatever_an_agent_asks_for():
    async def agent(task, session):
        await session.trajectory("ab").generate(temperature=2)
        return 1.0

    store, engine = run_one(agent, "a", sampling=Sampling(max_tokens=4, temperature=0.0))
    assert engine.requests[0].sampling.temperature == 0
    assert rows(store)[0]["response_mask"] == [1]


@pytest.mark.parametrize("temperature", [-1, 1e-9, float("nan"), "hot", True])
def test_a_temperature_that_is_none_is_told(temperature):
    async def agent(task, session):
        await session.trajectory("ab").generate(temperature=temperature)

    cause = causes(run_one(agent, "a")[0])["p", 0, 0]
    assert f"temperature is {temperature!r}; it takes 0 (greedy) or a number from 0.0001 on" in cause
