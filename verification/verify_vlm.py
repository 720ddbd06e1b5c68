"""The verification of images: three seeds that nothing was tuned on, each of which must learn.

    python verification/verify_vlm.py           # a few minutes a seed on two cores; finished ones are not run again

Writes docs/verification-images.md (the table) and docs/verification-images.svg from the runs' events.
"""

import sys

from curves import Panel, draw
from verify import DOCS, END, FEW, RUNS, START, Job, curve, mean, run

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
    lines, panels, learnt = [], [], True
    for job in JOBS:
        events = run(job, RUNS / "vlm")
        scores, exact = curve(events, "critic/score/mean"), curve(events, "session/exact_match/mean")
        images, rows_of = curve(events, "session/images/mean"), curve(events, "rows_per_session/mean")
        first, last = scores[0], mean(scores[-FEW:])
        good = first < START and last >= END
        learnt &= good
        rows = [round.rows or 0 for round in events.rounds]
        greedy = events.evals[-1].metrics["eval/score/mean"]
        lines.append(
            f"| {job.name} | {first:.3f} | {last:.3f} | {mean(exact[-FEW:]):.3f} | {greedy:.3f} | "
            f"{min(rows):,}-{max(rows):,} | {rows_of[-1]:.2f} | {images[-1]:.2f} | {'yes' if good else 'NO'} |"
        )
        panels.append(Panel(job.name, {"score": scores, "exact match": exact}))
    table = "\n".join([f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD), *lines])
    print(table)
    (DOCS / "verification-images.md").write_text(TEXT.format(table=table, start=START, end=END))
    title = "Counting red squares: score and exact match by round, dp 2, 45 prompts x 8 sessions, mini-batches of 15"
    (DOCS / "verification-images.svg").write_text(draw(panels, columns=3, title=title))
    print(f"written: {DOCS / 'verification-images.md'}, {DOCS / 'verification-images.svg'}")
    return 0 if learnt else 1


if __name__ == "__main__":
    sys.exit(main())
