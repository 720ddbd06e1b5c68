"""docs/weigh.svg: five rows cut in three ways; shares of a weighted sum add up to one number, means of means do not.

The plans are real. A token's loss is made up, one number a row.
"""

from raggedright import Layout, Plan, Rows, make_plan

TOKENS, LOSSES = (8, 2, 3, 6, 1), (0.5, 2.0, 1.0, 0.2, 3.0)
CUTS = {"one rank": (1, 5), "two ranks, two rows at most": (2, 2), "three ranks, a row each": (3, 1)}  # dp, rows
PANEL, LANE, TOKEN, TOP = 250, 62, 8, 54
STYLE = """\
text{font:12px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2933}
.b{font-weight:600}.c{text-anchor:middle}.w{fill:#fff}.m{fill:#65717e}.wrong{fill:#c0392b}.s{font-size:11px}
.page{fill:#fff;stroke:#d9dee4}.box{fill:#f0f2f5;stroke:#d9dee4}.padding{fill:none;stroke:#65717e;stroke-dasharray:2 2}
.r0{fill:#4c88d3}.r1{fill:#e38d3d}.r2{fill:#32a88e}.r3{fill:#cd6199}.r4{fill:#8166c3}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#919ca8}.wrong{fill:#f17871}.w{fill:#fff}
.page{fill:#0d1117;stroke:#303842}.box{fill:#1b222b;stroke:#303842}}
"""


def draw() -> str:
    """A panel a cut: its micro-batches with their shares, the sum of these, and the mean of micro-batch means."""
    width, height = PANEL * len(CUTS) + 20, TOP + LANE * 3 + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        "<title>Shares of a weighted sum add up to the same number in every cut; means of means do not</title>",
        f'<style>\n{STYLE}</style>\n<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}"/>',
    ]
    for i, (title, (dp_size, micro_batch_rows)) in enumerate(CUTS.items()):
        parts += _panel(20 + PANEL * i, title, _plan(dp_size, micro_batch_rows), height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plan(dp_size: int, micro_batch_rows: int) -> Plan:
    count = len(TOKENS)
    rows = Rows.from_columns(
        prompt=["p"] * count, session=range(count), trajectory=[0] * count, prompt_tokens=[1] * count,
        response_tokens=TOKENS,
    )  # fmt: skip
    layout = Layout(
        dp_size=dp_size, batch_size=1, mini_batch_size=1, rollout_n=count, micro_batch_rows=micro_batch_rows
    )
    return make_plan(rows, layout)


def _panel(x: int, title: str, plan: Plan, height: int) -> list[str]:
    (step,) = plan.steps("actor")
    parts = [f'<text class="b" x="{x}" y="28">{title}</text>']
    shares, means = [], []
    for dp_rank in range(step.dp_size):
        left, y = x, TOP + LANE * dp_rank
        for slot in range(step.num_slots):
            rows = [int(row) for row in step.micro_batch(dp_rank, slot)]
            weights = step.micro_batch_weight(dp_rank, slot).tolist()
            tokens = [TOKENS[row] if row < len(TOKENS) else 1 for row in rows]
            losses = [LOSSES[row] if row < len(LOSSES) else 0.0 for row in rows]
            sums = [count * loss for count, loss in zip(tokens, losses, strict=True)]
            shares.append(sum(weight * each for weight, each in zip(weights, sums, strict=True)))
            means.append(sum(sums) / sum(tokens))
            box = sum(TOKEN * count + 14 for count in tokens) + 6
            parts.append(f'<rect class="box" x="{left}" y="{y}" width="{box}" height="26" rx="3"/>')
            at = left + 5
            for row, count, loss in zip(rows, tokens, losses, strict=True):
                bar = TOKEN * count + 10
                kind = f"r{row}" if row < len(TOKENS) else "padding"
                parts.append(f'<rect class="{kind}" x="{at}" y="{y + 5}" width="{bar}" height="16" rx="2"/>')
                ink = "w" if row < len(TOKENS) else "m"
                parts.append(f'<text class="c s {ink}" x="{at + bar / 2:g}" y="{y + 17}">{loss:g}</text>')
                at += bar + 4
            parts.append(f'<text class="s m" x="{left + 3}" y="{y + 39}">{shares[-1]:.2f}</text>')
            left += box + 10
    foot = height - 36
    total, mean = sum(shares), sum(means) / len(means)
    parts.append(f'<text class="b" x="{x}" y="{foot}">sum of the shares: {total:.2f}</text>')
    kind = "m" if abs(mean - total) < 1e-9 else "wrong"
    parts.append(f'<text class="{kind}" x="{x}" y="{foot + 20}">mean of the means: {mean:.2f}</text>')
    return parts
