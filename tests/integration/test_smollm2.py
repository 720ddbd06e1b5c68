"""One round of `configs/smollm2.toml`, as a user runs it, with a real tokenizer, template and model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from raggedright.agents.agent_session import Session, Task
from raggedright.config import load_config
from raggedright.rollout.engine import Sampling
from raggedright.store.sqlite import SqliteStore
from recorded import recorded_sessions
from unit.agents.scripted import ScriptEngine, causes, rows, tasks_of
from unit.agents.scripted import run as run_sessions
from unit.agents.test_agents_chat import CALL, RESULTS, SYSTEM, TEMPLATE, TOOL, USER

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2.toml"
TEMPERATURE = 0.7
SMALL = {
    "train.rounds": 1, "train.batch_size": 2, "train.mini_batch_size": 2, "rollout.max_tokens": 12, "parallel.dp": 1,
    "rollout.temperature": TEMPERATURE,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]


class Run(NamedTuple):
    folder: Path
    out: str
    err: str


def start(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def model_folder() -> Path:
    path = load_config(CONFIG).model.path
    assert path
    if not (ROOT / path).is_dir():
        pytest.skip(f"{path} is not there; `make train-smollm2` downloads and converts it")
    return ROOT / path


def train(folder: Path, **changes: object) -> Run:
    """One round, with further keys, whose sections are before two underscores."""
    keys = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    done = start("-m", "raggedright", "train", str(CONFIG), "--out", str(folder), *options)
    assert done.returncode == 0, done.stderr
    return Run(folder, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    yield train(folder)
    shutil.rmtree(folder)  # 2 GB


def round_metrics(run: Run) -> dict[str, float]:
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "round"]
    return event["metrics"]


def loaded(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


class Row(NamedTuple):
    prompt: str
    score: float
    ids: list[int]
    prompt_tokens: int
    log_probs: torch.Tensor


def rows_of(folder: Path) -> list[Row]:
    """The round's rows; each session has one."""
    with SqliteStore(folder / "rows.db", read_only=True) as store:
        sessions = recorded_sessions(store, 1)
    rows = []
    for session in sessions:
        (row,) = session.trajectories
        assert session.score is not None
        log_probs = torch.from_numpy(row.rollout_log_probs)
        rows.append(Row(session.key.prompt, session.score, row.input_ids.tolist(), row.prompt_tokens, log_probs))
    return rows


@torch.no_grad()
def log_probs_of(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Of a row's reply, by the model alone: no cache, no packing, no neighbours."""
    ids = torch.tensor([row.ids])
    logits = model(input_ids=ids).logits[0, row.prompt_tokens - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, row.prompt_tokens :, None])[:, 0]


def test_the_converted_model_answers_a_question_and_ends_its_turn(model_folder: Path) -> None:
    model, tokenizer = loaded(model_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(str(prompt), return_tensors="pt", add_special_tokens=False).input_ids
    ask = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    new = model.generate(ids, **ask)[0, ids.shape[1] :]  # pyright: ignore[reportCallIssue]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  12 a")) == ["ĠĠ", "1", "2", "Ġa"]


def test_the_round_is_a_real_one_and_says_so(run: Run) -> None:
    assert run.out.rstrip().endswith(f"report: {run.folder / 'report.html'}")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "round"]
    metrics = event["metrics"]
    assert event["failed"] == []
    assert event["sessions"] == event["rows"] == 8
    assert 0 < metrics["actor/grad_norm"] < 1e3
    assert abs(metrics["rollout_corr/kl"]) < 1e-4
    assert "arning" not in run.err


def test_rows_hold_the_chat_as_the_template_writes_it_and_the_log_probs_of_the_first_weights(
    run: Run, model_folder: Path
) -> None:
    model, tokenizer = loaded(model_folder)
    for row in rows_of(run.folder):
        prompt, reply = row.ids[: row.prompt_tokens], row.ids[row.prompt_tokens :]
        text = tokenizer.decode(prompt)
        assert isinstance(text, str)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("?<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.eos_token_id not in reply[:-1]
        torch.testing.assert_close(row.log_probs, log_probs_of(model, row), rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_export_has_the_trainers_weights_and_has_learnt_from_the_round(run: Run, model_folder: Path) -> None:
    """What it has learnt: log-probs of replies rise where the score is above the mean of its group."""
    before, _ = loaded(model_folder)
    after, tokenizer = loaded(run.folder / "model")
    state = {name: torch.empty_like(weight) for name, weight in after.state_dict().items()}
    load({"actor model": state}, checkpoint_id=run.folder / "checkpoints" / "round-000001", no_dist=True)
    for name, weight in after.state_dict().items():
        assert torch.equal(weight, state[name]), name
    rows = rows_of(run.folder)
    gain = 0.0
    for row in rows:
        group = [other.score for other in rows if other.prompt == row.prompt]
        change = log_probs_of(after, row).sum() - log_probs_of(before, row).sum()
        gain += (row.score - sum(group) / len(group)) * float(change)
    assert gain > 0
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template


def test_a_chat_with_tools_has_the_tokens_of_the_template_and_those_that_were_sampled(model_folder: Path) -> None:
    """Its own template knows no tools, and says so; with one that does, the row is the template's text, as sampled."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    async def agent(task: Task, session: Session) -> float:
        chat = session.trajectory([SYSTEM, {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}])
        await chat.generate()
        chat.observe([USER])
        session.tokenizer.chat_template = TEMPLATE
        chat = session.trajectory([SYSTEM, USER], tools=[TOOL], chat_template_kwargs={"enable_thinking": True})
        await chat.generate()
        chat.observe(RESULTS)
        return 1.0

    async def lists_tools(task: Task, session: Session) -> float:
        session.trajectory([USER], tools=[TOOL])
        return 1.0

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    sampled = [token for letter in CALL for token in ids(letter)]  # as no tokenizer would encode it
    options = {"sampling": Sampling(max_tokens=200, stop_ids=frozenset([tokenizer.eos_token_id])), "timeout": 60.0}
    options |= {"tokenizer": tokenizer, "max_row_tokens": 2_000}
    refused = run_sessions(lists_tools, [(tasks_of("p")[0], 0)], **options)
    assert "1 tools are given and the tokenizer's chat template lists none" in causes(refused)["p", 0, 0]
    engine = ScriptEngine([*ids("Yes."), tokenizer.eos_token_id], [*sampled, tokenizer.eos_token_id])
    talk = [SYSTEM, USER, {"role": "assistant", "content": "Yes."}, USER]
    plain = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    store = run_sessions(agent, [(tasks_of("p")[0], 0)], engine=engine, **options)
    assert not causes(store)
    first, second = rows(store)
    assert first["input_ids"] == ids(str(plain))
    talk = [SYSTEM, USER, {"role": "assistant", "content": CALL}, *RESULTS]
    whole = tokenizer.apply_chat_template(talk, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(second["input_ids"]) == whole
    at = second["response_mask"].index(0)
    assert second["input_ids"][-len(second["response_mask"]) :][: at - 1] == sampled


def test_recomputed_activations_give_the_same_gradient(run: Run, tmp_path: Path) -> None:
    recomputed = train(tmp_path / "run", model__activation_checkpointing="true")
    ours, plain = round_metrics(recomputed), round_metrics(run)
    assert ours["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert ours["actor/entropy"] == pytest.approx(plain["actor/entropy"], rel=1e-5)
    shutil.rmtree(tmp_path)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights(run: Run, tmp_path: Path) -> None:
    """The rollout computes in float32, so `rollout_corr/kl` shows the rounding of the training passes."""
    mixed = train(tmp_path / "run", model__compute_dtype="bfloat16")
    ours, plain = round_metrics(mixed), round_metrics(run)
    assert 0 < abs(ours["rollout_corr/kl"]) < 0.05
    assert ours["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=0.5)
    before, after = (
        AutoModelForCausalLM.from_pretrained(each) for each in (run.folder / "model", tmp_path / "run/model")
    )
    assert {p.dtype for p in after.parameters()} == {torch.float32}
    moved = [float((a - b).detach().abs().max()) for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-3  # the steps are small, and were not lost in the rounding of bfloat16
    shutil.rmtree(tmp_path)


def test_an_adapter_trains_and_its_checkpoint_has_nothing_of_the_base(tmp_path: Path, model_folder: Path) -> None:
    adapted = train(tmp_path / "run", lora__rank=8, reference__kl="loss")
    metrics = round_metrics(adapted)
    assert 0 < metrics["actor/grad_norm"] < 1e3
    assert abs(metrics["actor/kl_loss"]) < 1e-6  # the reference is the base, where the only step begins
    files = (adapted.folder / "checkpoints" / "round-000001").rglob("*")
    assert sum(path.stat().st_size for path in files) < 60e6
    base, merged = (AutoModelForCausalLM.from_pretrained(each) for each in (model_folder, adapted.folder / "model"))
    changed = [
        name for (name, a), b in zip(base.named_parameters(), merged.parameters(), strict=True) if (a != b).any()
    ]
    assert changed
    assert all(".layers." in name for name in changed)
    shutil.rmtree(tmp_path)
