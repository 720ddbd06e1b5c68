"""docs/api.md: every public name with its types and its one sentence, from the code itself."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import get_args

from raggedright.advantages import Estimator, KlEstimator, PolicyLoss
from raggedright.ledger import State
from raggedright.plan.layout import Align, Collate, LossAgg, OverLong
from raggedright.plan.planner import Role

HEAD = """\
# The library

Three imports: `raggedright` needs numpy alone; `raggedright.tensors`, for a loop of your own, and `raggedright.agents`,
for agents, need torch (`pip install '.[train]'` in a clone).
These names are kept; what is not here may change. In use: [own_trainer.md](own_trainer.md). Made by `make pages`.

`Ints`, `Floats`, `Bools` and `Strings` are numpy arrays. Choices:
"""
CHOICES = {
    "Align": Align, "Collate": Collate, "OverLong": OverLong, "LossAgg": LossAgg, "Role": Role, "Estimator": Estimator,
    "State": State, "PolicyLoss": PolicyLoss, "KlEstimator": KlEstimator,
}  # fmt: skip
PARTS = {
    "raggedright": {
        "Rows": ("Rows", "RowsError"),
        "The plan": (
            "Layout", "make_plan", "Plan", "PlannedMicroBatch", "Step", "token_weights", "Imbalance",
            "measure_imbalance",
        ),
        "Advantages": ("Scores", "session_advantages", "broadcast_to_rows"),
        "The ledger": ("close_ledger", "Ledger", "Outcome", "LedgerError"),
        "Errors": ("RaggedRightError", "ConfigError"),
    },
    "raggedright.tensors": {
        "Fields and padding rows": (
            "infer_schema", "Schema", "Kind", "Fields", "padding_rows", "PaddingRow", "padding_token_id",
        ),
        "Micro-batches": ("TensorBatch", "Collator", "MicroBatch", "image_filler"),
        "The model": ("forward_log_probs", "TokenOutputs", "forward_values"),
        "Losses": ("policy_loss", "kl_loss", "entropy_loss", "value_loss", "Sums", "TokenWeights"),
        "Values": ("gae", "whiten"),
        "Metrics and ranks": ("off_policy_metrics", "sum_gradients", "sum_metrics", "sum_in_backward"),
    },
    "raggedright.agents": {
        "An agent": ("Agent", "Task", "Session", "SessionError"),
        "Its contexts": ("Trajectory", "Reply", "Tokens", "Message", "Picture"),
    },
}  # fmt: skip


FOR_THE_RUNNER = ("check_open", "end", "release", "row", "rows")  # methods of Session and Trajectory that may change


def page() -> str:
    """The page."""
    lines = [HEAD]
    lines += [f"- `{name}`: {', '.join(f'`{each}`' for each in get_args(choice))}" for name, choice in CHOICES.items()]
    for module_name, parts in PARTS.items():
        module = import_module(module_name)
        lines.append(f"\n## {module_name}\n")
        for title, names in parts.items():
            lines.append(f"### {title}\n")
            for name in names:
                lines += _entry(name, getattr(module, name))
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, thing: object) -> Iterator[str]:
    if inspect.isfunction(thing):
        (node,) = ast.parse(inspect.getsource(thing)).body
        yield f"- **`{_call(node, name)}`** {_sentence(inspect.getdoc(thing))}"
    elif not inspect.isclass(thing):
        yield f"- **`{name}`** is `{str(thing).replace('collections.abc.', '')}`."
    elif issubclass(thing, Exception):
        yield f"- **`{name}({thing.__bases__[0].__name__})`** {_sentence(inspect.getdoc(thing))}"
    else:
        text, *points = (inspect.getdoc(thing) or "").split("\n- ")
        yield f"- **`{name}`** {_sentence(text)}"
        yield from (f"  - {_sentence(point)}" for point in points)
        if issubclass(thing, Enum):
            yield f"  - {', '.join(f'`{member.value}`' for member in thing)}"
        else:
            yield from _members(thing)


def _members(thing: type) -> Iterator[str]:
    """A class's fields in one line, then its methods and properties."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(tree, ast.ClassDef)
    fields = [ast.unparse(node) for node in tree.body if isinstance(node, ast.AnnAssign)]
    if fields := [field for field in fields if "init=False" not in field]:
        yield f"  - fields: {', '.join(f'`{field}`' for field in fields)}"
    of_agents = thing.__module__.startswith("raggedright.agents")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (node.name.startswith("_") and node.name != "__call__") or (of_agents and node.name in FOR_THE_RUNNER):
            continue
        is_property = {"property", "cached_property"} & {ast.unparse(each) for each in node.decorator_list}
        call = _call(node, thing.__name__.lower() if node.name == "__call__" else f".{node.name}")
        yield f"  - `{call.replace('() ->', ':') if is_property else call}` {_sentence(ast.get_docstring(node))}"


def _call(node: ast.stmt, name: str) -> str:
    """A function as it is called, with its types."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert node.returns is not None
    arguments = ast.unparse(node.args)
    for own in ("self", "cls"):
        arguments = arguments.removeprefix(own).removeprefix(", ")
    asynchronous = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{asynchronous}{name}({arguments}) -> {ast.unparse(node.returns).strip(chr(39))}"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())
