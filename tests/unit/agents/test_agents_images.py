"""Images in contexts: the processor's tokens and pixels are recorded as they are, and what cannot be is told."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from raggedright.agents import tiles
from raggedright.agents.agent_session import Session, Task
from raggedright.agents.vision import MEDIA, Vision
from raggedright.errors import RowsError
from raggedright.rollout.engine import Generation, Sampling
from raggedright.store.session_store import Store
from recorded import recorded_sessions
from unit.agents.scripted import NoiseEngine, ScriptEngine, causes, run
from unit.vision_cases import END, START, load

PAGE = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
_, TOKENIZER, VISION = load("qwen3_vl")
EOS: int = TOKENIZER.eos_token_id  # type: ignore[assignment]
IMAGE = VISION.image_token_id
SEEN = START + VISION.placeholder + END
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}"
    "{% if add_generation_prompt %}-{% endif %}"
)


def gray(height: int, width: int, value: int = 128) -> np.ndarray:
    return np.full((height, width, 3), value, dtype=np.uint8)


def run_one(agent, *replies, tokenizer: PreTrainedTokenizerBase = TOKENIZER, vision: Vision | None = VISION):
    engine = ScriptEngine(*replies)
    sampling = Sampling(max_tokens=8, stop_ids=frozenset([EOS]))
    task = (Task(uid="p", data={}), 0)
    return run(agent, [task], engine=engine, tokenizer=tokenizer, vision=vision, sampling=sampling), engine


def fields(store: Store) -> list[dict]:
    """The fields of all rows, with their media in a mapping of its own."""
    rows = [trajectory.fields for session in recorded_sessions(store) for trajectory in session.trajectories]
    media = [{n.partition(".")[2]: v for n, v in row.items() if n.startswith(f"{MEDIA}.")} for row in rows]
    return [{**row, MEDIA: of_row} for row, of_row in zip(rows, media, strict=True)]


def test_a_row_has_the_processors_tokens_pixels_and_positions_with_axes():
    async def agent(task: Task, session: Session) -> float:
        looking = session.trajectory(f"1:{SEEN}=", images=[gray(16, 24)])  # 2 x 3 tokens of 8 x 8 pixels
        await looking.generate()
        looking.observe(f"r{SEEN}", images=[gray(8, 8, 200)])
        await looking.generate()
        await session.trajectory("12").generate()
        return 1.0

    store, engine = run_one(agent, [4, EOS], [5, EOS], [6, EOS])
    row, text = fields(store)
    one, colon, equals, red, start, end = TOKENIZER.encode(f"1:=r{START}{END}", add_special_tokens=False)
    prompt = [one, colon, start, *[IMAGE] * 6, end, equals]
    assert row["input_ids"].tolist() == [*prompt, 4, EOS, red, start, IMAGE, end, 5, EOS]
    assert row["response_mask"].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    media = row["multi_modal_inputs"]
    assert media["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]
    assert media["pixel_values"].shape == (24 + 4, 3 * 2 * 4 * 4)
    assert row["position_ids"][0].tolist() == [0, 1, 2, *[3] * 6, *range(6, 16)]
    assert row["position_ids"][1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, *range(6, 16)]
    assert row["position_ids"][2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, *range(6, 16)]
    assert (text["multi_modal_inputs"], text["position_ids"].tolist()) == ({}, [[*range(4)]] * 3)
    seen = [len((request.media or {}).get("image_grid_thw", ())) for request in engine.requests]
    assert seen == [1, 2, 0]


def test_messages_have_their_images_in_parts_and_go_on_after_a_reply():
    chat = copy.deepcopy(TOKENIZER)
    chat.chat_template = TEMPLATE
    one = {"type": "image", "image": Image.new("RGB", (8, 8))}

    async def agent(task: Task, session: Session) -> float:
        talk = session.trajectory([{"role": "r", "content": [one, {"type": "text", "text": "12"}]}])
        await talk.generate()
        talk.observe([{"role": "g", "content": [{"type": "text", "text": "3"}, one]}])
        await talk.generate()
        return 1.0

    store, _ = run_one(agent, [4, EOS], [5, EOS], tokenizer=chat)
    (row,) = fields(store)
    text = f"r:{SEEN}12=-4<eos>g:3{SEEN}=-5<eos>"
    assert row["input_ids"].tolist() == TOKENIZER.encode(text, add_special_tokens=False)
    assert row["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 2, 2]] * 2


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        (f"1{SEEN}", [], "stands for an image and none is given"),
        ([1, IMAGE], [], "stands for an image and none is given"),
        ("1", [gray(8, 8)], "0 placeholders .* and 1 images; they must agree"),
        (f"1{SEEN}{SEEN}", [gray(8, 8)], "2 placeholders"),
        ([1, 2], [gray(8, 8)], "images are given with token ids"),
        (f"1{SEEN}", [gray(8, 8)[0]], "image 0 is a ndarray; give"),
        (f"1{SEEN}", ["no/such.png"], "image 0 cannot be read: .*No such file"),
        (f"1{SEEN}", [gray(8, 2000)], "aspect ratio"),
        (f"1{SEEN}", [gray(80, 80)], "gets at least 103 tokens"),
        ([{"role": "user", "content": "1"}], [gray(8, 8)], "images are given with messages"),
    ],
)
def test_what_cannot_be_seen_fails_its_session_in_a_sentence(prompt, images, words):
    async def agent(task: Task, session: Session) -> float:
        session.trajectory(prompt, images=images)
        return 1.0

    store, _ = run_one(agent, [1])
    (cause,) = causes(store).values()
    assert "SessionError: row p/0/0" in cause
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(cause)


def test_a_model_of_text_takes_no_images():
    async def agent(task: Task, session: Session) -> float:
        session.trajectory("1", images=[gray(8, 8)])
        return 1.0

    store, _ = run_one(agent, [1], vision=None)
    assert "1 images are given and the model takes none" in next(iter(causes(store).values()))


class Eyes(NoiseEngine):
    """Counts what is red among the pixels or in the letters, and adds it to the note."""

    async def generate(self, request):
        self.requests.append(request)
        letters = TOKENIZER.convert_ids_to_tokens([*request.ids])
        red = letters.count("r")
        if request.media:
            patches = request.media["pixel_values"].reshape(-1, 4, 3, 2 * 4 * 4).mean(dim=(1, 3))
            red = int((patches[:, 0] > patches[:, 1:].amax(dim=1)).sum())
        note = 0 if letters[0] == "-" else int(letters[0])
        return Generation([note + red, EOS], [-0.1, -0.1], "stop", 0)


def test_tiles_that_are_counted_right_score_one_and_rows_mix(monkeypatch):
    monkeypatch.setattr(tiles, "SIDE", 8)  # as these models have it
    sessions = [(Task(uid=str(i), data=tiles.tasks(i, 1)), s) for i in range(12) for s in range(4)]
    engine = Eyes()
    sampling = Sampling(max_tokens=8, stop_ids=frozenset([EOS]))
    store = run(
        tiles.Tiles(), sessions, engine=engine, tokenizer=TOKENIZER, vision=VISION, sampling=sampling, timeout=30.0
    )
    entries = recorded_sessions(store)
    assert {entry.score for entry in entries} == {1.0}
    assert {len(entry.trajectories) for entry in entries} == {1, 2, 3}
    roles = [row.role for entry in entries for row in entry.trajectories]
    assert 0.1 < roles.count("told") / len(roles) < 0.5
    widths = {int(grid[2]) for r in engine.requests if r.media for grid in r.media["image_grid_thw"]}
    assert widths == {2, 4, 6}


def test_a_malformed_note_ends_the_session():
    store, _ = run_one(tiles.Tiles(), [4, 4])
    assert "field squares is None" in next(iter(causes(store).values()))
    task = (Task(uid="p", data={"squares": "rgrgrg"}), 0)
    sampling = Sampling(max_tokens=8, stop_ids=frozenset([EOS]))
    store = run(
        tiles.Tiles(), [task], engine=ScriptEngine([4, 4]), tokenizer=TOKENIZER, vision=VISION, sampling=sampling
    )
    (entry,) = recorded_sessions(store)
    assert (entry.score, len(entry.trajectories)) == (0.0, 1)


def test_the_agent_of_the_page_looks_and_is_recorded(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    Image.new("RGB", (16, 8)).save(tmp_path / "picture.png")
    task = (Task(uid="p", data={"path": str(tmp_path / "picture.png")}), 0)
    engine = ScriptEngine([5, EOS], [5, EOS], [7, EOS])
    store = run(names["describe"], [task], engine=engine, tokenizer=TOKENIZER, vision=VISION)
    (entry,) = recorded_sessions(store)
    assert (entry.cause, entry.score) == ("", 1.0)
    looked, text = fields(store)
    assert looked["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    assert text["multi_modal_inputs"] == {}


def test_positions_refuse_a_row_whose_placeholders_do_not_fit():
    with pytest.raises(RowsError, match="1 image tokens and its 1 images take 6"):
        VISION.fields([1, IMAGE], {"image_grid_thw": torch.tensor([[1, 4, 6]])})
