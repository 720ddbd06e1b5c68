"""What a session records: ids, masks and log-probs as they happened, and chat turns as the template has them."""

import asyncio

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from raggedright.agents.agent_session import Session, SessionError, Task
from raggedright.rollout.engine import Sampling
from recorded import recorded_sessions
from unit.agents.scripted import EOS, NoiseEngine, ScriptEngine, causes, rows, run, tasks_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")


def chat_tokenizer() -> PreTrainedTokenizerFast:
    names = [*"abcdefghijklmnopqrstuvwxyz ;", *ROLES, "<eos>", "<pad>"]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": [*ROLES]})  # type: ignore[dict-item]
    made.chat_template = TEMPLATE
    return made


CHAT = chat_tokenizer()


def ids(text: str) -> list[int]:
    return CHAT.encode(text, add_special_tokens=False)


def run_one(agent, *replies, tokenizer=None, **changes):
    options = {} if tokenizer is None else {"tokenizer": tokenizer}
    engine = ScriptEngine(*replies) if replies else NoiseEngine()
    if tokenizer is CHAT:
        changes["sampling"] = Sampling(max_tokens=8, stop_ids=frozenset(ids("<eos>")))
    store = run(agent, [(tasks_of("p")[0], 0)], engine=engine, **options, **changes)
    return store, engine


def test_generated_tokens_carry_loss_and_observed_ones_none():
    async def agent(task: Task, session: Session) -> float:
        main = session.trajectory("1:2=", role="main")
        first = await main.generate()
        assert (first.ids, first.text, first.finish_reason) == ([4, EOS], "4", "stop")
        main.observe("78")
        main.observe([9])
        await main.generate(max_tokens=1)
        main.reward = 0.25
        session.trajectory([1, 2])
        session.report(exact_match=1, tries=2.5)
        return 1

    store, engine = run_one(agent, [4, EOS], [5, 6, 7])
    (entry,) = recorded_sessions(store)
    main, other = rows(store)
    prompt = [1, 11, 2, 13]
    assert main["input_ids"] == [*prompt, 4, EOS, 7, 8, 9, 5]
    assert main["response_mask"] == [1, 1, 0, 0, 0, 1]
    assert main["rollout_log_probs"] == [-0.5, -0.5, 0, 0, 0, -0.5]
    assert [*engine.requests[1].ids] == [*prompt, 4, EOS, 7, 8, 9]
    assert engine.requests[0].noise == engine.requests[1].noise
    assert (other["input_ids"], other["response_mask"], other["rollout_log_probs"]) == ([1, 2], [], [])
    assert (entry.score, type(entry.score)) == (1.0, float)
    assert entry.metrics == {"exact_match": 1.0, "tries": 2.5}
    first, second = entry.trajectories
    assert (first.role, first.reward, first.finish_reason, first.weight_version) == ("main", 0.25, "length", 3)
    assert (first.generations, first.cut_generations) == (2, 1)
    assert (second.role, second.reward, second.finish_reason, second.weight_version) == ("agent", None, "none", -1)
    assert (second.generations, second.cut_generations) == (0, 0)
    counts = [(row.prompt_tokens, row.response_tokens, row.loss_tokens) for row in entry.trajectories]
    assert counts == [(4, 6, 3), (2, 0, 0)]


def test_a_generation_gets_the_room_that_is_left_in_the_row():
    async def agent(task, session):
        trajectory = session.trajectory("1" * 60)
        reply = await trajectory.generate(max_tokens=1_000)
        assert (len(reply.ids), reply.finish_reason) == (4, "length")
        return 1.0

    store, engine = run_one(agent, [1] * 1_000)
    assert not causes(store)
    assert engine.requests[0].sampling.max_tokens == 4


def test_a_context_shorter_than_the_row_limit_is_named_instead():
    async def agent(task, session):
        session.trajectory("1" * 40)
        return 1.0

    store = run(agent, [(tasks_of("p")[0], 0)], engine=NoiseEngine(context_tokens=32))
    assert causes(store)["p", 0, 0].startswith(
        "SessionError: row p/0/0 gets at least 40 tokens, and the model's context has 32; use a model with a longer"
    )


def test_trajectories_run_at_once_and_are_numbered_as_they_open():
    async def agent(task, session):
        many = [session.trajectory(str(i), role=f"r{i}") for i in range(5)]
        await asyncio.gather(*(each.generate() for each in reversed(many)))
        return 1.0

    store, engine = run_one(agent)
    assert [row.role for row in recorded_sessions(store)[0].trajectories] == [f"r{i}" for i in range(5)]
    assert len({request.noise for request in engine.requests}) == 5


def test_a_generation_that_is_given_up_leaves_the_context_as_it_was():
    class Slow(NoiseEngine):
        async def generate(self, request):
            if len(self.requests) == 0:
                self.requests.append(request)
                await asyncio.sleep(1e6)
            return await super().generate(request)

    async def agent(task, session):
        trajectory = session.trajectory("1=")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(trajectory.generate(), 0.02)
        await trajectory.generate()
        return 1.0

    engine = Slow()
    assert not causes(run(agent, [(tasks_of("p")[0], 0)], engine=engine))
    assert engine.requests[0].ids == engine.requests[1].ids


def test_stop_texts_reach_the_engine():
    async def agent(task, session):
        trajectory = session.trajectory("1=")
        await trajectory.generate(stop="ab")
        await trajectory.generate(stop=["c", "d"])
        await trajectory.generate(stop=[""])

    store, engine = run_one(agent, [1], [1])
    assert [request.sampling.stop_texts for request in engine.requests] == [("ab",), ("c", "d")]
    assert "stop is ['']; it takes texts of one character or more" in causes(store)["p", 0, 0]


USER = {"role": "user", "content": "hello"}
NEXT = [{"role": "tool", "content": "sunny"}, {"role": "user", "content": "  and now "}]


def test_a_chat_has_the_tokens_of_its_template():
    async def agent(task, session):
        chat = session.trajectory([USER])
        reply = await chat.generate()
        chat.observe(NEXT)
        second = await chat.generate()
        assert (reply.text, second.text) == ("hi", "yes")
        return 1.0

    store, _ = run_one(agent, ids("hi<eos>"), ids("yes<eos>"), tokenizer=CHAT)
    assert not causes(store)
    talk = [USER, {"role": "assistant", "content": "hi"}, *NEXT, {"role": "assistant", "content": "yes"}]
    whole = CHAT.apply_chat_template(talk, tokenize=False)
    assert isinstance(whole, str)
    (row,) = rows(store)
    assert row["input_ids"] == ids(whole)
    assert row["input_ids"] == ids("<user>hello;<assistant>hi<eos><tool>sunny;<user>and now;<assistant>yes<eos>")
    assert row["response_mask"] == [1] * 3 + [0] * 17 + [1] * 4


def test_a_turn_cut_by_its_length_is_ended_by_an_observed_token():
    async def agent(task, session):
        chat = session.trajectory([USER])
        await chat.generate(max_tokens=2)
        chat.observe([{"role": "user", "content": "go on"}])
        await chat.generate()
        return 1.0

    store, _ = run_one(agent, ids("hi there<eos>"), ids("no<eos>"), tokenizer=CHAT)
    (row,) = rows(store)
    assert row["input_ids"] == ids("<user>hello;<assistant>hi<eos><user>go on;<assistant>no<eos>")
    assert row["response_mask"][:4] == [1, 1, 0, 0]


def test_generated_tokens_stay_as_they_are_though_the_text_would_be_encoded_otherwise():
    """The template trims a reply in its history, and " h" is not "h"; the row has what was generated."""

    async def agent(task, session):
        chat = session.trajectory([USER])
        await chat.generate()
        chat.observe([USER])
        return 1.0

    store, _ = run_one(agent, ids("  h <eos>"), tokenizer=CHAT)
    assert rows(store)[0]["input_ids"] == ids("<user>hello;<assistant>  h <eos><user>hello;<assistant>")


@pytest.mark.parametrize(
    ("use", "cause"),
    [
        (lambda s: s.trajectory("ab").observe([USER]), "messages are observed and its prompt was text or ids"),
        (lambda s: s.trajectory([USER]).observe([USER]), "messages are observed before a reply; give them all at once"),
        (lambda s: s.trajectory([{"role": "user"}]), "message 0 is {'role': 'user'}; a message is a mapping with role"),
        (lambda s: s.trajectory([1, "a"]), "token 1 is 'a'; give text, token ids, or messages"),
    ],
)
def test_chats_that_cannot_be_are_told(use, cause):
    async def agent(task, session):
        use(session)

    assert cause in causes(run_one(agent, tokenizer=CHAT)[0])["p", 0, 0]


def test_a_tokenizer_without_a_template_is_told():
    async def agent(task, session):
        session.trajectory([USER])

    assert "the tokenizer has no chat template; give text or token ids" in causes(run_one(agent)[0])["p", 0, 0]


def test_text_that_a_made_tokenizer_does_not_know_fails_the_session():
    async def greets(task, session):
        session.trajectory("Hello")
        return 1.0

    cause = causes(run(greets, [(task, 0) for task in tasks_of("a")]))["a", 0, 0]
    assert "the tokenizer has no token for 'Helo'" in cause
    assert "a made model has only those of model.symbols" in cause


@pytest.mark.parametrize(
    "name",
    ["__metadata__", "input_ids", "response_mask", "rollout_log_probs", "rollout_temperatures", "position_ids",
     "routed_experts", "multi_modal_inputs", "multi_modal_inputs.pixel_values"],
)  # fmt: skip
def test_a_field_with_a_reserved_name_cannot_be_attached(name: str):
    async def agent(task: Task, session: Session) -> float:
        main = session.trajectory("1:2=")
        await main.generate()
        main.attach(**{name: [0.0, 0.0]})
        return 1

    assert f"row p/0/0: {name} is a field that the row itself records" in causes(run_one(agent, [4, EOS])[0])["p", 0, 0]


def test_fields_that_are_attached_have_one_number_per_response_token():
    async def agent(task: Task, session: Session) -> float:
        main = session.trajectory("1:2=")
        await main.generate()
        main.attach(teacher_log_probs=[-1.0, -2.0])
        main.observe("7")
        with pytest.raises(SessionError, match=r"row p/0/0: x has shape \(2,\) and the response 3 tokens"):
            main.attach(x=[1.0, 2.0])
        with pytest.raises(SessionError, match=r"x is 'abc'"):
            main.attach(x="abc")  # pyright: ignore[reportArgumentType]
        return 1

    store, _ = run_one(agent, [4, EOS])
    (entry,) = recorded_sessions(store)
    assert {name: values.tolist() for name, values in entry.trajectories[0].extra.items()} == {
        "teacher_log_probs": [-1.0, -2.0, 0.0]
    }
