"""Rows like those of a run, about 57 KB each, for the store's benchmark."""

import torch

from raggedright.store.protocol import NewRow, SessionKey

ROWS_A_SESSION = 8
PROMPT, RESPONSE = 300, 1_350
FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask", "rollout_log_probs", "uid"]


def session_rows(seed: int) -> list[NewRow]:
    """The rows of one session; lengths vary by a third."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(ROWS_A_SESSION):
        response = int(RESPONSE * (2 / 3 + 2 / 3 * torch.rand((), generator=generator)))
        ids = torch.randint(0, 150_000, (PROMPT + response,), generator=generator)
        fields = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(len(ids)),
            "responses": ids[PROMPT:].clone(),
            "response_mask": torch.ones(response, dtype=torch.bool),
            "rollout_log_probs": -torch.rand(response, generator=generator),
            "uid": f"prompt-{seed}",
        }
        tags = {"uid": f"prompt-{seed}", "turn": 3, "reward": 0.5}
        row = NewRow(prompt_tokens=PROMPT, response_tokens=response, loss_tokens=response, fields=fields, tags=tags)
        rows.append(row)
    return rows


def row_bytes(rows: list[NewRow]) -> int:
    """The bytes of these rows' tensors."""
    tensors = [value for row in rows for value in row.fields.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def session_key(i: int, round: int) -> SessionKey:
    """The i-th session of a round, eight to a prompt."""
    return SessionKey(round, f"prompt-{i // 8:05d}", i % 8)
