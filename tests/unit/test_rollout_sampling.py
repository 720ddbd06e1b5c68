"""Noise by name, and the choice of tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raggedright.errors import ConfigError
from raggedright.rollout import sampling
from raggedright.rollout.engine import EngineError, Sampling
from raggedright.rollout.sampling import choose, noise_key, uniforms

TOP = 1 - 2.0**-53


def _choose(logits: torch.Tensor, rows: list[Sampling], u: list[float] | np.ndarray) -> tuple[list[int], list[float]]:
    return choose(logits, rows, np.asarray(u, dtype=np.float64))


def _keys(count: int) -> list[bytes]:
    return [
        noise_key(seed=3, round=1, prompt=f"p{number}", session=number % 8, attempt=0, trajectory=0)
        for number in range(count)
    ]


def _chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_name_and_every_position_has_noise_of_its_own() -> None:
    names = {"seed": 1, "round": 2, "prompt": "3", "session": 4, "attempt": 5, "trajectory": 6}
    others = [names | {name: 7} for name in names if name != "prompt"] + [names | {"prompt": "3/"}]
    keys = {noise_key(**each) for each in [names, *others]}
    assert len(keys) == 7
    assert noise_key(**names) == noise_key(**names)
    assert len(np.unique(uniforms(sorted(keys) * 50, np.repeat(np.arange(50), 7)))) == 350


def test_names_cannot_be_read_in_two_ways() -> None:
    mine = noise_key(seed=1, round=1, prompt="1/2", session=1, attempt=1, trajectory=1)
    assert mine != noise_key(seed=1, round=1, prompt="2", session=1, attempt=1, trajectory=11)
    assert mine != noise_key(seed=11, round=1, prompt="/2", session=1, attempt=1, trajectory=1)
    assert noise_key(seed=0, round=0, prompt="\udc80", session=0, attempt=0, trajectory=0)


def test_noise_stays_the_same_from_version_to_version() -> None:
    key = noise_key(seed=0, round=1, prompt="p0", session=0, attempt=0, trajectory=0)
    assert key.hex() == "1777b6789a79ce31be1d99fc3b8ea339"
    assert uniforms([key] * 3, np.array([0, 1, 1_000_000])).tolist() == [
        0.8295345304410539,
        0.22243932970240055,
        0.7718983446556381,
    ]


def test_noise_is_uniform_and_unrelated_along_a_row_and_between_rows() -> None:
    keys = _keys(400)
    u = np.stack([uniforms(keys, np.full(400, position)) for position in range(250)])
    assert ((u >= 0) & (u < 1)).all()
    # 99 degrees of freedom: 0.001 of all samples are above 149.
    assert _chi_square(np.histogram(u, bins=100, range=(0, 1))[0], np.full(100, 0.01)) < 149
    for left, right in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / math.sqrt(left.size)


@pytest.mark.parametrize(
    "row",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.6),
        Sampling(max_tokens=1, top_k=5),
        Sampling(max_tokens=1, temperature=1.3, top_p=0.7),
        Sampling(max_tokens=1, top_k=8, top_p=0.8),
    ],
)
def test_frequencies_are_the_probabilities_and_log_probs_say_so(row: Sampling) -> None:
    count = 20_000
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1.5, 16))
    ids, log_probs = _choose(logits.expand(count, -1), [row] * count, uniforms(_keys(count), np.full(count, 7)))
    order = sorted(range(16), key=lambda i: -logits[i].item())[: row.top_k or 16]
    probs = torch.softmax(logits[order] / row.temperature, -1).numpy()
    kept = [i for i in range(len(order)) if probs[:i].sum() < row.top_p]
    probs = probs[kept] / probs[kept].sum()
    counts = np.array([ids.count(order[i]) for i in kept])
    assert counts.sum() == count
    # 15 degrees of freedom or fewer: 0.001 of all samples are above 37.7.
    assert _chi_square(counts, probs) < 37.7
    said = dict(zip(ids, log_probs, strict=True))
    for i, prob in zip(kept, probs, strict=True):
        assert said[order[i]] == pytest.approx(math.log(prob), abs=1e-12)


def test_a_greedy_row_takes_the_best_token_and_says_its_plain_log_prob() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    rows = [Sampling(max_tokens=1, temperature=0.0, top_k=1, top_p=0.1), Sampling(max_tokens=1)]
    ids, log_probs = _choose(logits, rows, [0.99, 0.0])
    assert ids == [1, 0]
    assert log_probs == pytest.approx(torch.log_softmax(logits.double(), -1)[[0, 1], [1, 0]].tolist(), abs=1e-15)


@given(
    logits=st.lists(st.one_of(st.floats(-90, 90, width=32), st.just(-math.inf)), min_size=1, max_size=30).filter(
        lambda row: any(math.isfinite(x) for x in row)
    ),
    u=st.one_of(st.floats(0, TOP), st.just(TOP), st.just(0.0)),
    top_k=st.integers(0, 40),
    top_p=st.floats(1e-6, 1.0),
    temperature=st.one_of(st.just(1.0), st.floats(1e-300, 5.0)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_token_without_a_probability_is_never_chosen(
    logits: list[float], u: float, top_k: int, top_p: float, temperature: float, dtype: torch.dtype
) -> None:
    row = torch.tensor([logits], dtype=dtype)
    for cut in (Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p), Sampling(max_tokens=1)):
        (token,), (log_prob,) = _choose(row, [cut], [u])
        assert math.isfinite(log_prob)
        assert log_prob <= 1e-12
        rank = int((row[0] > row[0, token]).sum())
        assert not cut.top_k or rank < cut.top_k


def test_rounding_at_the_ends_leads_to_a_token_that_has_a_probability() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]])
    chosen = sampling._with_weight(torch.tensor([[5]]), weights)
    assert chosen.tolist() == [[3]]
    assert sampling._with_weight(torch.tensor([[2]]), weights).tolist() == [[1]]
    assert sampling._with_weight(torch.tensor([[0]]), weights).tolist() == [[1]]


@given(seed=st.integers(0, 999), rows=st.integers(1, 12))
def test_a_row_is_chosen_by_itself_also_when_a_batch_is_cut_into_chunks(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2, (rows, 9)))
    settings = [
        Sampling(
            max_tokens=1,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 3])),
            top_p=float(rng.choice([0.5, 1.0])),
        )
        for _ in range(rows)
    ]
    u = rng.random(rows)
    ids, log_probs = _choose(logits, settings, u)
    alone = [_choose(logits[i : i + 1], settings[i : i + 1], u[i : i + 1]) for i in range(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CHUNK", 20)
        chunked = _choose(logits, settings, u)
    assert ids == [each[0][0] for each in alone] == chunked[0]
    assert log_probs == [each[1][0] for each in alone] == chunked[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_that_says_so(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(EngineError, match=r"1 of 3 rows have logits.*1 of 4 in the first.*diverged"):
        _choose(logits, [Sampling(max_tokens=1)] * 3, [0.1, 0.2, 0.3])
    with pytest.raises(EngineError, match="1 of 1 rows"):
        _choose(torch.full((1, 4), -math.inf), [Sampling(max_tokens=1)], [0.5])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1, "temperature": -1.0}, "temperature is -1.0"),
        ({"max_tokens": 1, "temperature": math.nan}, "temperature is nan"),
        ({"max_tokens": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"max_tokens": 1, "top_k": -1}, "top_k is -1"),
        ({"max_tokens": 1, "stop_texts": ("",)}, "empty text"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sampling(**settings)
