"""Tool results in chats whose templates have the rules of Qwen3, Llama 3.1, Mistral and gpt-oss.

The text of a row must be the template's own rendering of the conversation, and its replies the tokens as generated.
"""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from raggedright.rollout.engine import Sampling
from unit.agents.scripted import ScriptEngine, causes, rows, run, tasks_of

QWEN3 = """
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if tools and false %}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """
{%- set header = namespace(begin='<|start_header_id|>', end='<|end_header_id|>\\n\\n') %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- header.begin + message.role + header.end + message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- header.begin + 'assistant' + header.end }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
{%- else %}
{{- header.begin + 'ipython' + header.end + message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header.begin + 'assistant' + header.end }}{% endif %}
"""
MISTRAL = """
{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role != 'tool' and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/...') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- else %}
{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""
GPT_OSS = """
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}{{ raise_exception('You have passed a message containing tags') }}{% endif %}
{%- if 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- set last.name = call.name %}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- set last.name = none %}
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}
{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if tools and false %}{% endif %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
ARGUMENTS = {"city": "Bonn"}
CALL_ID = "call1abcd"
CALL = {"type": "function", "id": CALL_ID, "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USER = {"role": "user", "content": "Is it sunny in Bonn?"}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "clear"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    for name in ("weather_map", "weather", "time")
]


@dataclass(frozen=True)
class Style:
    """A template, its special tokens, and how a model of this kind writes a call and a text."""

    template: str
    special: tuple[str, ...]  # the first ends a call, the second a text
    call: str
    text: str

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([self.template], trainer)
        tokenizer.add_special_tokens([*self.special])  # not in additional_special_tokens, as gpt-oss has <|call|>
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=self.special[1], pad_token="<|pad|>")
        made.add_tokens(["<tool_call>", "</tool_call>"])
        made.chat_template = self.template
        return made


_CALL_JSON = json.dumps(CALL["function"])
STYLES = {
    "qwen3": Style(
        QWEN3,
        ("<|im_end|>", "<|im_end|>", "<|im_start|>"),
        f"<tool_call>\n{_CALL_JSON}\n</tool_call>",
        "Yes.",
    ),
    "llama": Style(
        LLAMA,
        ("<|eot_id|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        _CALL_JSON.replace("arguments", "parameters"),
        "Yes.",
    ),
    "mistral": Style(
        MISTRAL,
        ("</s>", "</s>", "[TOOL_CALLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        f'[TOOL_CALLS] [{_CALL_JSON[:-1]}, "id": "{CALL_ID}"}}]',
        " Yes.",
    ),
    "gpt-oss": Style(
        GPT_OSS,
        ("<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>"),
        f" to=functions.weather<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}",
        "<|channel|>final<|message|>Yes.",
    ),
}


def talk(style: Style, turns: list[tuple[str, list[dict]]], *, arguments: dict | None = None, **options) -> str:
    """The text of a row in which each reply is followed by messages; the replies are the tokens as generated."""
    tokenizer = style.tokenizer
    for name, value in options.items():
        setattr(tokenizer, name, value)
    replies = [tokenizer.encode(reply, add_special_tokens=False) for reply, _ in turns]

    async def agent(task, session) -> float:
        chat = session.trajectory([USER], tools=TOOLS, chat_template_kwargs=arguments or {})
        for _, messages in turns:
            await chat.generate()
            chat.observe(messages)
        return 1.0

    stops = frozenset(tokenizer.get_vocab()[token] for token in style.special[:2])
    store = run(
        agent,
        [(tasks_of("p")[0], 0)],
        engine=ScriptEngine(*replies),
        sampling=Sampling(max_tokens=500, stop_ids=stops),
        max_row_tokens=4_000,
        tokenizer=tokenizer,
        timeout=20.0,
    )
    assert not causes(store)
    (row,) = rows(store)
    mask = [0] * (len(row["input_ids"]) - len(row["response_mask"])) + row["response_mask"]
    generated = [token for token, loss in zip(row["input_ids"], mask, strict=True) if loss]
    assert generated == [*chain.from_iterable(replies)]
    return "".join(tokenizer.decode(row["input_ids"]))


def rendered(style: Style, messages: list[dict], **arguments) -> str:
    text = style.tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True, **arguments
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_chat_with_results_and_texts_is_what_the_template_writes(style: Style):
    call, text = f"{style.call}{style.special[0]}", f"{style.text}{style.special[1]}"
    last = {**USER, "content": "And tomorrow?"}
    found = talk(style, [(call, [RESULT]), (call, [RESULT]), (text, [last]), (call, [RESULT])])
    said = {"role": "assistant", "content": "Yes."}
    whole = [USER, CALLED, RESULT, CALLED, RESULT, said, last, CALLED, RESULT]
    # Mistral's template moves the tools to the last user message; here tokens are only ever appended.
    tools = f"[AVAILABLE_TOOLS] {json.dumps(TOOLS)}[/AVAILABLE_TOOLS]" if style is STYLES["mistral"] else ""
    assert found == tools + rendered(style, whole)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_results_for_a_reply_that_is_no_call_are_rendered_all_the_same(style: Style):
    """As for a call: a tool's answer says that nothing could be parsed."""
    expected = rendered(style, [USER, CALLED, RESULT]).partition(style.call + style.special[0])[2]
    assert expected
    for reply in ("weather {", f"{style.call[:-3]} oops", "weather"):
        for end in (style.special[0], ""):  # the turn was ended, or cut by its length
            assert talk(style, [(reply + end, [RESULT])]).endswith(f"{reply}{style.special[0]}{expected}")


def test_several_results_follow_a_reply_even_if_the_template_writes_one_call_only():
    style = STYLES["llama"]
    found = talk(style, [(f"{style.call}; {style.call}<|eot_id|>", [RESULT, {**RESULT, "content": "23 C"}])])
    ipython = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    assert f"{style.call}<|eot_id|>{ipython}clear<|eot_id|>{ipython}23 C<|eot_id|><|start_header_id|>assis" in found


def test_a_turn_ends_as_the_template_ends_one_with_calls():
    style = STYLES["llama"]
    found = talk(style, [(f"{style.call}<|eom_id|>", [RESULT])], arguments={"builtin_tools": ["search"]})
    assert f"{style.call}<|eom_id|><|start_header_id|>ipython" in found


def test_a_results_header_has_the_name_of_the_message_or_of_the_parsed_call_or_of_the_reply():
    style = STYLES["gpt-oss"]
    call = f"{style.call}<|call|>"
    assert "<|call|><|start|>functions.time to=assistant" in talk(style, [(call, [{**RESULT, "name": "time"}])])
    assert "<|call|><|start|>functions.weather to=assistant" in talk(style, [(call, [{**RESULT}])])
    unknown = f" to=functions.radar<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
    parses = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "tool_calls": {
                "open_pattern": r" to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>",
                "close": ["<|call|>"],
                "content": "json",
                "repeats": True,
                "optional": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            }
        },
    }
    assert "<|call|><|start|>functions.radar to=" in talk(style, [(unknown, [RESULT])], response_template=parses)


def test_a_result_without_the_id_that_the_template_demands_fails_with_its_words():
    style = STYLES["mistral"]
    with pytest.raises(AssertionError, match="Tool call IDs should be alphanumeric"):
        talk(style, [(f"{style.call}</s>", [{"role": "tool", "content": "clear"}])])
