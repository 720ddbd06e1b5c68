"""Made-up runs for the report's tests: believable numbers, no training."""

import math
from pathlib import Path

import numpy as np

from raggedright import Layout, Rows
from raggedright.report.events import MODELS, Event, EventLog

LAYOUT = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8, micro_batch_tokens=512)
CONFIG = {
    "out": "runs/latest",
    "seed": 0,
    "model": {
        "path": None,
        "made": {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2},
        "dtype": "float32",
    },
    "prompts": {"source": "raggedright.agents.digits:task"},
    "agent": {"name": "compaction", "options": {"digits": 6, "chunk": [2, 4]}},
    "rollout": {"n": 8, "temperature": 1.0, "max_tokens": 16, "timeout": 300.0, "on_failure": "exclude"},
    "train": {"rounds": 150, "batch_size": 45, "mini_batch_size": 15, "align": "steps", "loss_agg": "token-mean"},
    "algorithm": {"advantages": "grpo", "std": True, "policy_loss": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    "optimizer": {"lr": 0.003, "betas": [0.9, 0.999], "grad_clip": 1.0, "warmup": 0.05, "decay": "cosine"},
    "parallel": {"dp": 2, "shard": "none", "device": "cpu"},
    "eval": {"every": 10, "prompts": 64},
}
START = {
    "time": "2026-03-02T09:14:07Z", "version": "0.1.0", "config": CONFIG, "layout": LAYOUT,
    "num_parameters": 121_472, "world": {"dp": 2, "device": "cpu"},
}  # fmt: skip


def event(kind: str, /, **fields: object) -> Event:
    """An event of the given kind."""
    return MODELS[kind].model_validate(fields)


def write_run(folder: Path, *, rounds: int = 150, end: str | None = "finished", seed: int = 0) -> Path:
    """A run that learns, with evaluations, samples and now and then a failed session."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with EventLog(folder / "events.jsonl") as log:
        log.write(event("start", **START))
        for number in range(1, rounds + 1):
            if number in {1, rounds} or number % max(rounds // 10, 1) == 0:
                rows = made_rows(rng, number)
                log.write(event("rows", round=number, columns=columns_of(rows), layout=LAYOUT))
                log.write(
                    event("samples", round=number, sessions=[_session(rng, number / rounds, s) for s in range(3)])
                )
            log.write(event("round", **made_round(rng, number, rounds)))
            if number % 10 == 0:
                score = _score(number, rounds)
                log.write(event("eval", round=number, metrics={
                    "eval/score/mean": min(score * 1.04, 1.0), "eval/exact_match/mean": score**1.7,
                }))  # fmt: skip
        if end:
            log.write(event("end", time="2026-03-02T09:15:19Z", rounds=rounds, reason=end, seconds=0.48 * rounds))
    return folder


def columns_of(rows: Rows) -> dict[str, list]:
    names = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")
    return {name: getattr(rows, name).tolist() for name in names}


def made_rows(rng: np.random.Generator, number: int, *, prompts: int = 45) -> Rows:
    """Rows of 8 sessions a prompt, each of one to four."""
    names = [(p, s, t) for p in range(prompts) for s in range(8) for t in range(int(rng.integers(1, 5)))]
    prompt, session, trajectory = zip(*names, strict=True)
    response = rng.integers(3, 18, len(names))
    return Rows.from_columns(
        prompt=[str(45 * number + p) for p in prompt],
        session=session,
        trajectory=trajectory,
        prompt_tokens=rng.integers(4, 12, len(names)),
        response_tokens=response,
        loss_tokens=np.maximum(response - 2, 0),
    )


def _score(number: int, rounds: int) -> float:
    return 0.04 + 0.9 / (1 + math.exp(-10 * (number / max(rounds, 1) - 0.42)))


def made_round(rng: np.random.Generator, number: int, rounds: int) -> dict[str, object]:
    """The fields of a round's event."""
    score = float(np.clip(_score(number, rounds) + rng.normal(0, 0.018), 0, 1))
    rows = int(780 + 60 * math.sin(number / 17) + rng.normal(0, 18))
    padding = int(rng.random() < 0.3) + 2 * int(rng.random() < 0.04)
    failed = [
        {"prompt": str(int(rng.integers(45))), "session": int(rng.integers(8)), "cause": "timed out after 300 s"}
        for _ in range(int(rng.random() < 0.05))
    ]
    sessions = {"trained": 360 - len(failed), **({"failed (timed out after 300 s)": 1} if failed else {})}
    no_loss = int(rng.integers(0, 3))
    seconds = {"rollout": 0.19, "store": 0.012, "plan": 0.004, "log_probs": 0.06, "update": 0.17}
    tokens = rows * 17.4 + 2 * padding
    return {
        "round": number,
        "rows": rows,
        "padding_rows": padding,
        "sessions": 360,
        "optimizer_steps": 3,
        "skipped_steps": 0,
        "ledger": {
            "sessions": sessions,
            "rows": {"trained": rows - no_loss, **({"skipped (no loss tokens)": no_loss} if no_loss else {})},
            "padding_rows": padding,
        },
        "failed": failed,
        "seconds": {part: mean * float(rng.lognormal(0, 0.13)) for part, mean in seconds.items()},
        "metrics": {
            "critic/score/mean": score,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "session/exact_match/mean": float(np.clip(score**1.8 + rng.normal(0, 0.015), 0, 1)),
            "rows_per_session/mean": rows / 360,
            "rows_per_session/min": 1.0,
            "rows_per_session/max": float(rng.integers(4, 6)),
            "response_length/mean": 9.5 + float(rng.normal(0, 0.2)) - 2 * number / rounds,
            "actor/pg_loss": float(rng.normal(-0.02, 0.02)),
            "actor/entropy": 2.1 * math.exp(-3 * number / rounds) + 0.12 + float(rng.normal(0, 0.02)),
            "actor/ppo_kl": abs(float(rng.normal(0.0007, 0.0006))),
            "actor/pg_clipfrac": abs(float(rng.normal(0.02, 0.01))),
            "actor/grad_norm": abs(float(rng.normal(0.5, 0.14))),
            "actor/lr": 0.003 * min(1, number / 8) * (0.55 + 0.45 * math.cos(math.pi * number / max(rounds, 1))),
            "perf/tokens": tokens,
            "perf/tokens_per_second": tokens / 0.43 * float(rng.lognormal(0, 0.08)),
            "perf/micro_batches": 28.0,
        },
    }  # fmt: skip


def _session(rng: np.random.Generator, progress: float, number: int) -> dict[str, object]:
    digits = [str(d) for d in rng.integers(0, 10, 12)]
    good = rng.random() < 0.1 + 0.85 * progress
    advantage = float(abs(rng.normal(0.8, 0.4))) * (1 if good else -1)
    trajectories = []
    for part in range(int(rng.integers(2, 5))):
        chunk = digits[3 * part : 3 * part + 3]
        answer = [*("+".join(chunk)), "=", str(int(rng.integers(0, 28))), "<eos>"]
        seen = ["\n", "ok", " so", " far", "\n"] if part == 1 else []
        tokens = ["carry", " ", str(part), " |", *chunk, "\n", *answer, *seen, *(["9", "<eos>"] if seen else [])]
        response = len(answer) + len(seen) + (2 if seen else 0)
        mask = [1] * len(answer) + [0] * len(seen) + [1] * (2 if seen else 0)
        trajectories.append({
            "role": "summary" if part else "agent", "reward": None, "tokens": tokens,
            "prompt_tokens": len(tokens) - response, "mask": mask, "advantages": [advantage * m for m in mask],
            "log_probs": (-abs(rng.normal(0, 0.4 + 1.2 * (1 - progress), response)) * mask).tolist(),
            "finish_reason": "stop",
        })  # fmt: skip
    return {
        "prompt": str(int(rng.integers(6000))), "session": number, "score": float(good),
        "task": {"digits": "".join(digits)}, "trajectories": trajectories,
    }  # fmt: skip


HOSTILE = (
    "</script><script>alert(1)</script>", "</style><img src=x onerror=alert(2)>", "\"'><svg onload=alert(3)>",
    "{{ 7 * 7 }}", "\u202egnp.exe\u2066", "\x00\x07\x1b[31m", "\ud800", "]]><!--", "&lt;b&gt;", "\u2028", "",
    "\n\n", "\" onmouseover=\"alert(5)", "</title><base href=//evil.example/>", "url(https://evil.example/x)",
    "\ufeff\ufffe", "javascript:alert(4)", "\u05d0" * 50,
)  # fmt: skip


def write_hostile_run(folder: Path, *, long: int = 1_000_000) -> Path:
    """A run whose every string is out to break the page; `long` is the length of the longest of them."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [*HOSTILE, "L" * long]
    rng = np.random.default_rng(0)
    with EventLog(folder / "events.jsonl") as log:
        config = {f"{i}{text[:1000]}": {text[:1000]: text, "list": [text]} for i, text in enumerate(texts)}
        named = {"agent": {"name": HOSTILE[0]}, "model": {"path": HOSTILE[2]}, "train": {"rounds": HOSTILE[1]}}
        start = {"config": {**config, **named}, "world": {"dp": 2, "device": HOSTILE[1]}}
        log.write(event("start", **{**START, **start, "time": HOSTILE[2], "version": HOSTILE[0]}))
        for number, text in enumerate(texts, start=1):
            fields = made_round(rng, number, len(texts))
            metrics = {
                f"actor/{text}": rng.normal(),
                f"session/{text}/mean": 1e308 * (-1) ** number,
                "actor/nan": math.nan,
            }
            log.write(event("round", **{
                **fields, "metrics": {**metrics, "critic/score/mean": math.inf}, "seconds": {text: 0.1},
                "ledger": {"sessions": {text: 5, f"failed ({text})": 3}, "rows": {text: 7}},
                "failed": [{"prompt": text, "session": number, "cause": text}],
            }))  # fmt: skip
        rows = made_rows(rng, 1, prompts=len(texts))
        names = [texts[int(p) - 45][:1000] for p in rows.prompt]
        log.write(event("rows", round=1, columns={**columns_of(rows), "prompt": names}))
        tokens = [*HOSTILE, *HOSTILE, "L" * 1000]
        log.write(event("samples", round=1, sessions=[{
            "prompt": text, "session": i, "score": math.nan, "task": {text: text}, "trajectories": [{
                "role": text, "reward": -math.inf, "tokens": tokens, "prompt_tokens": 3, "mask": [1, 0] * 5,
                "advantages": [math.nan, 1e308, -1e308], "log_probs": [-math.inf], "finish_reason": text,
            }],
        } for i, text in enumerate(texts[-5:])]))  # fmt: skip
        log.write(event("eval", round=3, metrics={"eval/score/mean": -5e300, HOSTILE[0]: 1}))
        log.write(event("end", time=HOSTILE[0], rounds=1, reason=HOSTILE[1], seconds=math.inf))
    return folder
