"""GAE against its definition, written out as sums; whitening over a batch's loss tokens."""

import statistics

import pytest
import torch

from raggedright import RowsError
from raggedright.tensors.gae import gae, whiten

torch.set_num_threads(1)

GAMMA, LAM = 0.97, 0.9


def make_rows(seed: int = 0, dtype: torch.dtype = torch.float64):
    """Ragged rows with observations at the start, inside and at the end; one row has no loss token, one no token."""
    generator = torch.Generator().manual_seed(seed)
    masks = [[1, 1, 1], [0, 1, 0, 0, 1, 1, 0], [1], [0, 0], [], [1, 0] * 6, [1] * 9]
    mask = [torch.tensor(row, dtype=torch.int64) for row in masks]
    rewards, values = ([torch.randn(len(m), generator=generator, dtype=dtype) for m in mask] for _ in range(2))
    return rewards, values, mask


def plain_gae(reward, value, mask):
    """Advantages at the loss tokens: the sum over k of (gamma lam)^k delta, over loss tokens alone."""
    places = [t for t, m in enumerate(mask.tolist()) if m]
    v = [value[t].item() for t in places] + [0.0]
    delta = [reward[t].item() + GAMMA * v[i + 1] - v[i] for i, t in enumerate(places)]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(places):
        advantages[t] = sum((GAMMA * LAM) ** k * d for k, d in enumerate(delta[i:]))
    return advantages


def test_advantages_are_discounted_sums_of_td_errors_over_loss_tokens():
    rewards, values, mask = make_rows()
    advantages, returns = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    for i in range(len(mask)):
        expected = plain_gae(rewards[i], values[i], mask[i])
        assert advantages[i].tolist() == pytest.approx(expected, rel=1e-13, abs=1e-15)
        target = [a + v if m else 0 for a, v, m in zip(expected, values[i].tolist(), mask[i].tolist(), strict=True)]
        assert returns[i].tolist() == pytest.approx(target, rel=1e-13, abs=1e-15)


def test_lambda_one_without_a_critic_gives_the_reward_to_go():
    rewards = [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.5, 1.0])]
    values, mask = [torch.zeros_like(row) for row in rewards], [torch.ones_like(row) for row in rewards]
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert [row.tolist() for row in advantages] == [[1, 1, 1], [3.5, 1.5, 1.5, 1]]
    assert [row.tolist() for row in returns] == [[1, 1, 1], [3.5, 1.5, 1.5, 1]]


def test_a_row_does_not_depend_on_the_rows_beside_it():
    rewards, values, mask = make_rows()
    together, _ = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    for i in range(len(mask)):
        ((alone,), _) = gae(rewards[i : i + 1], values[i : i + 1], mask[i : i + 1], gamma=GAMMA, lam=LAM)
        assert torch.equal(alone, together[i])


def test_numbers_on_tokens_without_loss_reach_nothing():
    rewards, values, mask = make_rows()
    clean = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    for rubbish in (float("nan"), float("inf")):
        dirty = [[torch.where(m.bool(), x, rubbish) for x, m in zip(xs, mask, strict=True)] for xs in (rewards, values)]
        for a, b in zip(clean, gae(dirty[0], dirty[1], mask, gamma=GAMMA, lam=LAM), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    dirty = [torch.where(m.bool(), x, float("nan")) for x, m in zip(rewards, mask, strict=True)]
    for x, y in zip(whiten(dirty, mask), whiten(rewards, mask), strict=True):
        assert torch.equal(x, y)


def test_float32_rows_are_computed_in_float64():
    rewards, values, mask = make_rows(dtype=torch.float32)
    precise = gae([r.double() for r in rewards], [v.double() for v in values], mask, gamma=GAMMA, lam=LAM)
    for rows, expected in zip(gae(rewards, values, mask, gamma=GAMMA, lam=LAM), precise, strict=True):
        assert all(row.dtype == torch.float32 for row in rows)
        assert all(torch.equal(row, e.float()) for row, e in zip(rows, expected, strict=True))


def test_no_rows_give_no_rows():
    assert gae([], [], [], gamma=1.0, lam=1.0) == ([], [])
    assert whiten([], []) == []
    nothing = [torch.zeros(0)]
    assert [len(rows[0]) for rows in gae(nothing, nothing, nothing, gamma=1.0, lam=1.0)] == [0, 0]


def test_whitening_uses_the_sample_variance_of_all_loss_tokens():
    rewards, _, mask = make_rows()
    tokens = [x for row, m in zip(rewards, mask, strict=True) for x in row[m.bool()].tolist()]
    mean, std = statistics.fmean(tokens), (statistics.variance(tokens) + 1e-8) ** 0.5
    for row, m, white in zip(rewards, mask, whiten(rewards, mask), strict=True):
        expected = [(x - mean) / std if k else 0 for x, k in zip(row.tolist(), m.tolist(), strict=True)]
        assert white.tolist() == pytest.approx(expected, rel=1e-13)


def test_padding_and_order_change_no_bit_of_the_whitening():
    advantages, _, mask = make_rows()
    padding, no_loss = [torch.full((1,), 7.0, dtype=torch.float64)] * 5, [torch.zeros(1)] * 5
    expected = whiten(advantages, mask)
    padded = whiten([*padding, *reversed(advantages)], [*no_loss, *reversed(mask)])
    assert [row.tolist() for row in padded] == [[0.0]] * 5 + [row.tolist() for row in reversed(expected)]


@pytest.mark.parametrize("row", [[], [0.3], [0.3, 0.3]])
def test_tokens_without_a_spread_are_whitened_to_zero(row):
    """verl 0.9.1 raises when a batch has fewer than two loss tokens."""
    (white,) = whiten([torch.tensor(row, dtype=torch.float64)], [torch.ones(len(row))])
    assert white.tolist() == [0.0] * len(row)


def test_rows_of_different_lengths_are_named():
    rewards, values, mask = make_rows()
    with pytest.raises(RowsError, match=r"row 2: shapes are rewards \[1\], values \[2\], mask \[1\]"):
        gae(rewards, [*values[:2], torch.zeros(2), *values[3:]], mask, gamma=1.0, lam=1.0)
    with pytest.raises(RowsError, match="7 of advantages, 6 of mask"):
        whiten(values, mask[:-1])


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e150, 1.7e308])
def test_whitening_is_right_at_any_size(size):
    """Advantages of 1e200 were whitened to zero, since their squares overflow."""
    rows = [torch.tensor([0.0, 1.0, -1.0]).double() * size, torch.tensor([0.5]).double() * size]
    mask = [torch.ones_like(row) for row in rows]
    white = torch.cat(whiten(rows, mask))
    expected = torch.cat(whiten([row / size for row in rows], mask)) if size >= 1 else torch.zeros(4)
    assert white.tolist() == pytest.approx(expected.tolist(), abs=1e-7)


@pytest.mark.parametrize("size", [1.0, 1e200])
def test_advantages_that_differ_by_rounding_alone_are_whitened_to_zero(size):
    (white,) = whiten([torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64) * size], [torch.ones(2)])
    assert white.abs().max() < 1e-10
