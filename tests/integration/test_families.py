"""Every family of causal language models that transformers can make small: right in a collation, or refused by name."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verification.families import HOWS, PAGE, TOLERANCE, judge_all

SAMPLE = ["qwen3", "mistral", "gemma2", "llama4_text", "phi3", "gpt_oss", "bloom", "opt", "mamba", "jamba"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), id="all", marks=pytest.mark.slow),
    ],
)
def test_what_is_accepted_equals_rows_one_by_one_and_what_is_refused_is_named(names: list[str]) -> None:
    verdicts, causes = judge_all(names)
    assert len(verdicts) > 4 * len(causes)
    page = dict(line[2:].split(" | ", 1) for line in PAGE.read_text().splitlines() if line.startswith("| "))
    for name, of_family in verdicts.items():
        for how in HOWS:
            verdict = of_family[how]
            assert verdict.error < TOLERANCE, f"{name}, {how}"
            assert "model type '" in verdict.refused or "model's attention is" in verdict.refused or not verdict.refused
        if f"transformers {transformers.__version__}:" in PAGE.read_text():
            right = [cell.startswith("exact") for cell in page[name].strip(" |").split(" | ")]
            assert right == [not of_family[how].refused for how in HOWS], f"{name}: docs/models.md is out of date"


def test_most_families_can_be_packed_and_nearly_all_padded() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    packed, padded = (sum(row[column].startswith("exact") for row in rows) for column in (1, 3))
    assert packed > len(rows) // 2
    assert padded > 0.95 * len(rows)
