"""The page of a run in a real browser: it is laid out as meant, runs nothing and asks the network for nothing."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from raggedright.report.run_page import write_report
from unit.made_runs import write_hostile_run, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
LIMIT = 120  # seconds for a browser to start and draw on a busy machine

# Asks the page in a frame for its size and for what sticks out, and writes the answer into the outer document.
OUTER = """<!doctype html>
<iframe id="f" style="width:WIDTHpx;height:900px;border:0" src="PAGE"></iframe><pre id="answer"></pre>
<script>
f.onload = () => {
  const page = f.contentDocument, width = page.documentElement.clientWidth;
  const out = [...page.querySelectorAll("h1, h2, h3, p, td, .value, figcaption, .plot, .session, .wide")]
    .filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.className || e.tagName);
  const colour = getComputedStyle(page.body).backgroundColor;
  answer.textContent = JSON.stringify({width, scroll: page.documentElement.scrollWidth, out, colour,
    plots: page.querySelectorAll(".plot").length, plans: page.querySelectorAll("svg.plan").length,
    cut: [...page.querySelectorAll(".wide")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
    scripts: page.scripts.length, policy: page.querySelector("meta[http-equiv]").content});
};
</script>"""
OWN = re.compile(r"https?://([\w-]+\.)*(google|googleapis|gstatic|chromium)\.")  # the browser's own errands


def browse(profile: Path, url: str, *options: str) -> str:
    """The document after it has loaded, as the browser has it."""
    assert CHROMIUM is not None
    arguments = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--disable-component-update", "--disable-sync", "--allow-file-access-from-files", "--virtual-time-budget=3000",
        f"--user-data-dir={profile}", *options, "--dump-dom", url,
    )  # fmt: skip
    done = subprocess.run([CHROMIUM, *arguments], capture_output=True, timeout=LIMIT, check=True)
    return done.stdout.decode()


def ask(tmp_path: Path, page: Path, width: int, *options: str) -> dict:
    outer = tmp_path / "outer.html"
    outer.write_text(OUTER.replace("WIDTH", str(width)).replace("PAGE", page.as_uri()))
    dom = browse(tmp_path / "profile", outer.as_uri(), "--window-size=1700,1000", *options)
    found = re.search(r'<pre id="answer">(.+?)</pre>', dom)
    assert found, dom[-2000:]
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run"), rounds=40))


@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_the_page_fits_narrow_and_wide_windows(tmp_path, page, width):
    answer = ask(tmp_path, page, width)
    assert answer["scroll"] <= answer["width"] <= width
    assert answer["out"] == []
    assert answer["cut"] == 0  # the grid of a round is whole
    assert (answer["plots"], answer["plans"], answer["scripts"]) == (14, 2, 0)
    assert answer["policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_the_page_is_light_or_dark_as_the_reader_has_it(tmp_path, page):
    colours = {ask(tmp_path, page, 800, f"--blink-settings=preferredColorScheme={i}")["colour"] for i in (0, 1)}
    assert colours == {"rgb(255, 255, 255)", "rgb(13, 17, 23)"}


def asked(tmp_path: Path, page: Path) -> tuple[str, list[str]]:
    """The document, and what the browser asked the network for on its behalf, by its own record."""
    record = tmp_path / "net.json"
    dom = browse(tmp_path / "profile", page.as_uri(), f"--log-net-log={record}")
    urls = re.findall(r'"url":"(https?:[^"]+)"', record.read_text(errors="replace"))
    return dom, [url for url in urls if not OWN.match(url)]


def test_a_hostile_page_asks_the_network_for_nothing_and_runs_nothing(tmp_path):
    dom, urls = asked(tmp_path, write_report(write_hostile_run(tmp_path / "run", long=100_000)))
    assert urls == []
    assert not re.search(r"<(script|img|iframe|link|base|object)\b", dom)
    assert dom.count("alert(1)") > 10


def test_a_page_that_does_ask_is_noticed(tmp_path):
    (tmp_path / "page.html").write_text('<img src="http://evil.example/x.png">')
    assert set(asked(tmp_path, tmp_path / "page.html")[1]) == {"http://evil.example/x.png"}
