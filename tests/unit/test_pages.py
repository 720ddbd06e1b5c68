"""Pages and pictures that are made from the code are those of the code; and dependencies point one way."""

from graphlib import TopologicalSorter
from importlib import import_module

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


def test_every_module_belongs_to_one_station_of_the_table() -> None:
    placed = [name for members in imports.stations().values() for name in members]
    assert sorted(placed) == sorted(imports.modules()), "CONTRIBUTING's table of stations names each module once"


def test_imports_point_to_the_same_station_or_an_earlier_one() -> None:
    wrong = imports.backward(imports.imports(), imports.stations())
    assert not wrong, "CONTRIBUTING promises that dependencies point one way"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(imports.imports(for_types=False)).prepare()  # raises where there is a cycle
