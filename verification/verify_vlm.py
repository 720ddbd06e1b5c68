"""Train a vision-language model on three seeds that were not used for tuning. Each run must learn.

    python verification/verify_vlm.py           # a few minutes per seed on two cores; finished runs are not repeated

Writes docs/verification-images.md and docs/verification-images.svg from the events of the runs.
"""

import sys

from curves import draw
from verify import DOCS, END, RUNS, START, Job, Learning, curve, markdown, run

SEEDS = (101, 102, 103)
JOBS = [Job(f"tiles, seed {seed}", config="tiles", options=("--seed", str(seed))) for seed in SEEDS]
HEAD = (
    "run", "score, first round", "score, last 10 rounds", "exact match, last 10", "greedy score, end", "rows per round",
    "rows per session, last", "image rows per session", "learned",
)  # fmt: skip

TEXT = """\
# Verification of vision-language models

`make verify-vlm` trains each of these runs from scratch and writes this page. The config is `configs/tiles.toml`: a
randomly initialised Qwen3-VL, dp 2, batch_size 45, mini_batch_size 15, rollout.n 8, 100 rounds. An agent counts red
squares tile by tile, each in a new context with a note of the count so far. Some tiles are shown as images and some are
described in letters, so every batch has both image rows and text rows. The config was chosen on seed 0.

A run has learned if its first round scores below {start} and its last ten rounds score at least {end} on average.

![Score and exact match of every run](verification-images.svg)

{table}

Between none and all of the two to six squares are red, so always answering the same count is correct in less than a
quarter of the sessions.
"""


def main() -> int:
    """Run the jobs and write the table and the picture."""
    runs = {job.name: Learning.of(run(job, RUNS / "vlm")) for job in JOBS}
    rows = []
    for name, learning in runs.items():
        last = [curve(learning.events, f"{what}/mean")[-1] for what in ("rows_per_session", "session/images")]
        greedy = learning.events.evals[-1].metrics["eval/score/mean"]
        numbers = f"{greedy:.3f}", learning.rows_cell, *(f"{each:.2f}" for each in last)
        rows.append((name, *learning.cells, *numbers, learning.learned_cell))
    table, panels = markdown(HEAD, rows), [learning.panel(name) for name, learning in runs.items()]
    print(table)
    (DOCS / "verification-images.md").write_text(TEXT.format(table=table, start=START, end=END))
    title = "Counting red squares: score and exact match by round, dp 2, 45 prompts x 8 sessions, mini-batches of 15"
    (DOCS / "verification-images.svg").write_text(draw(panels, columns=3, title=title))
    print(f"written: {DOCS / 'verification-images.md'}, {DOCS / 'verification-images.svg'}")
    return 0 if all(learning.has_learned for learning in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
