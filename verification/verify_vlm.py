"""The verification of images: three seeds that nothing was tuned on, each of which must learn.

    python verification/verify_vlm.py           # a few minutes a seed on two cores; finished ones are not run again

Writes docs/verification-images.md (the table) and docs/verification-images.svg from the runs' events.
"""

import sys

from curves import draw
from verify import DOCS, END, RUNS, START, Job, Learning, curve, markdown, run

SEEDS = (101, 102, 103)
JOBS = [Job(f"tiles, seed {seed}", config="tiles", options=("--seed", str(seed))) for seed in SEEDS]
HEAD = (
    "run", "score, first round", "score, last 10 rounds", "exact match, last 10", "greedy score, end", "rows a round",
    "rows a session, last", "image rows a session", "learnt",
)  # fmt: skip

TEXT = """\
# Verification: images

`make verify-vlm` trains each of these from scratch and writes this page. The config is `configs/tiles.toml`: a Qwen3-VL
made on the spot, dp 2, batch_size 45, mini_batch_size 15, rollout.n 8, 100 rounds. An agent counts red squares tile by
tile, each in a fresh context with a note of the count so far; some tiles are shown and some are told in letters, so
that image rows and text rows mix in every batch. The config was chosen on seed 0. A run has learnt if its first round
scores below {start} and its last ten score at least {end} on average.

![Score and exact match of every run](verification-images.svg)

{table}

Any number of the squares is red, from none to all of the two to six, so that always answering
the same count is right in less than a quarter of the sessions.
"""


def main() -> int:
    """Run them, write the table and the picture."""
    runs = {job.name: Learning.of(run(job, RUNS / "vlm")) for job in JOBS}
    rows = []
    for name, learning in runs.items():
        last = [curve(learning.events, f"{what}/mean")[-1] for what in ("rows_per_session", "session/images")]
        greedy = learning.events.evals[-1].metrics["eval/score/mean"]
        numbers = f"{greedy:.3f}", learning.rows_cell, *(f"{each:.2f}" for each in last)
        rows.append((name, *learning.cells, *numbers, learning.learnt_cell))
    table, panels = markdown(HEAD, rows), [learning.panel(name) for name, learning in runs.items()]
    print(table)
    (DOCS / "verification-images.md").write_text(TEXT.format(table=table, start=START, end=END))
    title = "Counting red squares: score and exact match by round, dp 2, 45 prompts x 8 sessions, mini-batches of 15"
    (DOCS / "verification-images.svg").write_text(draw(panels, columns=3, title=title))
    print(f"written: {DOCS / 'verification-images.md'}, {DOCS / 'verification-images.svg'}")
    return 0 if all(learning.has_learnt for learning in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
