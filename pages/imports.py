"""Who imports whom, by part of CONTRIBUTING's table, from the code itself; and its picture.

A part is a line of the table: its files, or the whole folder where no other line names one of it. Imports point to
the same line or to one above it (`backward` lists those that do not). The modules that only re-export names for
users belong to no part: nothing inside imports them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "raggedright"
FACADES = ("raggedright", "raggedright.tensors", "raggedright.agents", "raggedright.integrations.verl")

LINE, LEFT, BOX, HEIGHT, WIDTH = 27, 20, 190, 20, 420
STYLE = """\
text{font:12px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2933}
.page{fill:#fff;stroke:#d9dee4}.box{fill:#f0f2f5;stroke:#d9dee4}.m{fill:#65717e}
path{fill:none;stroke:#4c88d3;stroke-width:1.3;opacity:.8}.head{fill:#4c88d3;stroke:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#919ca8}
.page{fill:#0d1117;stroke:#303842}.box{fill:#1b222b;stroke:#303842}}
"""


def modules() -> dict[str, Path]:
    """Every module of the package, but for those that only re-export."""
    names = {_dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in names.items() if name not in FACADES}


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(*, for_types: bool = True) -> dict[str, set[str]]:
    """What each module imports of the package, anywhere in it; on wish without what only type checkers read."""
    known = {*modules(), *FACADES}
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    return {name: set(_imported(tree, known, for_types)) for name, tree in trees.items()}


def _imported(node: ast.AST, known: set[str], for_types: bool) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module in known:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in known else node.module for name in inner)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from _imported(child, known, for_types)


def parts() -> dict[str, set[str]]:
    """The modules of each part, in the order of CONTRIBUTING's table."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| part |")[2].partition("\n\n")[0]
    lines = [line.split("|")[1:3] for line in table.splitlines() if "`" in line]
    named: dict[str, list[str]] = {}
    for part, files in lines:
        folder, paths = "", []
        for path in re.findall(r"`([^`]+)`", files):
            folder = f"{path.rpartition('/')[0]}/" if "/" in path else folder
            paths.append(path if "/" in path else folder + path)
        named[part.strip()] = paths
    folders = [{path.partition("/")[0] for path in paths if "/" in path} for paths in named.values()]
    shared = {folder for folder in set().union(*folders) if sum(folder in each for each in folders) > 1}
    found: dict[str, set[str]] = {}
    for part, paths in named.items():
        globs = [
            f"{path.partition('/')[0]}/**/*.py" if "/" in path and path.partition("/")[0] not in shared else path
            for path in paths
        ]
        found[part] = {_dotted(file) for glob in globs for file in PACKAGE.glob(glob)}
    for folder in shared:  # its own docstring decides nothing
        found[next(iter(found))].add(f"raggedright.{folder}")
    return {part: members & modules().keys() for part, members in found.items()}


def backward(graph: Mapping[str, set[str]], order: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that point to a later part, or to a name that is kept for users."""
    place = {name: i for i, members in enumerate(order.values()) for name in members}
    return [(a, b) for a, found in graph.items() for b in sorted(found) if place.get(b, len(order)) > place[a]]


def draw() -> str:
    """Parts in their order, and an arrow to each that is imported, but for what other arrows imply."""
    order, graph = parts(), imports()
    names = [*order]
    place = {name: i for i, members in enumerate(order.values()) for name in members}
    uses: list[set[int]] = [set() for _ in names]
    for name, found in graph.items():
        uses[place[name]] |= {place[other] for other in found} - {place[name]}
    reach: list[set[int]] = []
    for direct in uses:
        reach.append(direct.union(*(reach[i] for i in direct)))
    height = LINE * len(names) + 60
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" role="img">',
        "<title>Which part of the code imports which</title>",
        f'<style>\n{STYLE}</style>\n<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}"/>',
        f'<text class="m" x="{LEFT}" y="24">arrows point to what is imported, but for what others imply</text>',
    ]
    for i, (name, direct) in enumerate(zip(names, uses, strict=True)):
        y, x = 40 + LINE * i, LEFT + BOX
        svg.append(f'<rect class="box" x="{LEFT}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="3"/>')
        svg.append(f'<text x="{LEFT + 8}" y="{y + 14}">{name}</text>')
        for j in sorted(direct - set().union(*(reach[k] for k in direct))):
            start, end = y + 6, 40 + LINE * j + HEIGHT - 6
            far = x + 12 + 15 * (i - j)
            svg.append(f'<path d="M{x} {start}C{far} {start} {far} {end} {x + 6} {end}"/>')
            svg.append(f'<path class="head" d="M{x} {end}l8 -4v8z"/>')
    return "\n".join([*svg, "</svg>"]) + "\n"
