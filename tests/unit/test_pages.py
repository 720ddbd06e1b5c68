"""Pages and pictures that are made from the code are those of the code; and dependencies point one way."""

import re
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from pages import api, imports
from pages.__main__ import PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), f"docs/{name} is not what the code says: `make pages`"


@pytest.mark.parametrize("module", api.PARTS)
def test_the_library_page_has_every_public_name_once(module: str) -> None:
    named = [name for names in api.PARTS[module].values() for name in names]
    assert sorted(named) == sorted(import_module(module).__all__)


IMPORT = re.compile(r"^ *from (raggedright[.\w]*) import (.+)$", flags=re.MULTILINE)


def test_agents_in_docs_and_examples_import_only_what_is_promised() -> None:
    paths = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("examples/**/*.py")]
    found = [(path.name, *names) for path in paths for names in IMPORT.findall(path.read_text())]
    assert ("agents.md", "raggedright.agents", "Session, Task") in found
    promised = {module: {name for names in parts.values() for name in names} for module, parts in api.PARTS.items()}
    of_agents = [(page, module, names) for page, module, names in found if module.startswith("raggedright.agents")]
    for page, module, names in of_agents:
        assert {*re.split(", *", names)} <= promised.get(module, set()), f"{page} imports {names} from {module}"


def test_every_module_belongs_to_one_station_of_the_table() -> None:
    placed = [name for members in imports.parts().values() for name in members]
    assert sorted(placed) == sorted(imports.modules()), "CONTRIBUTING's table of parts names each module once"


def test_imports_point_to_the_same_station_or_an_earlier_one() -> None:
    wrong = imports.backward(imports.imports(), imports.parts())
    assert not wrong, "CONTRIBUTING promises that dependencies point one way"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(imports.imports(for_types=False)).prepare()  # raises where there is a cycle


MARKDOWN = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "CHANGELOG.md"]
CODE = re.compile(r"```sh\n(.*?)```|`([^`\n]+)`", flags=re.DOTALL)
FILE = re.compile(r"(?<![\w/.*-])[\w*][\w*./-]*\.(?:py|toml|md)\b(?!:)")  # `verl/base.py:230` is a line of verl's
PARTS = ("src", "tests", "pages", "benchmarks", "verification", "examples", "configs", "docs")
# Files of the reader, or of a run folder.
PLACEHOLDERS = {"my.toml", "my_module.py", "my_tracker.py", "agent.py", "config.toml"}


def code_of(page: Path) -> str:
    """The shell blocks and the code spans of a Markdown file."""
    return "\n".join(block or span for block, span in CODE.findall(page.read_text()))


def exists(file: str, page: Path) -> bool:
    """Whether a path that a page names leads to a file of the repository; a name without a folder may be anywhere."""
    roots = (ROOT, ROOT / "src" / "raggedright", ROOT / "tests" / "unit", ROOT / "tests" / "verl", page.parent)
    anywhere = () if "/" in file else (ROOT / part for part in PARTS)
    return any([*root.glob(file)] for root in roots) or any([*part.rglob(file)] for part in anywhere)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_files_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    code, makefile = code_of(page), (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"\bmake ([a-z][a-z0-9-]*)", code)}
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
    assert {file for file in {*FILE.findall(code)} - PLACEHOLDERS if not exists(file, page)} == set()


def test_the_check_of_named_files_reads_spans_and_blocks() -> None:
    names = {name for page in MARKDOWN for name in FILE.findall(code_of(page))}
    assert {"plan/assign.py", "examples/own_trainer.py", "tests/parallel/test_run_invariance.py"} <= names
