"""Write every page and picture that is made from the code: `python -m pages`."""

from collections.abc import Callable
from pathlib import Path

from pages import api, cli, config_keys, imports, weigh
from raggedright import Layout, Rows, make_plan
from raggedright.report.plan_svg import draw_plan

ROOT = Path(__file__).parents[1]


def plan_picture() -> str:
    """The README's picture: what `raggedright plan --format svg` draws of its example."""
    layout = Layout(dp_size=2, batch_size=6, mini_batch_size=2, rollout_n=4, micro_batch_tokens=2048)
    return draw_plan(make_plan(Rows.from_jsonl(ROOT / "examples" / "rows.jsonl"), layout)) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "cli.md": cli.page,
    "config.md": config_keys.page,
    "imports.svg": imports.draw,
    "plan.svg": plan_picture,
    "weigh.svg": weigh.draw,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())
