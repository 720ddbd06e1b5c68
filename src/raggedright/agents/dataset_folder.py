"""Tasks of a local folder in one of the formats of Hugging Face `datasets`: one row is one task.

A folder is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, or it has Parquet, JSONL or other files
that `load_dataset` reads. The option `split` chooses a split, or a part of one such as "train[:90%]"; `name` chooses a
configuration that the folder's README defines.

Nothing is downloaded. Rows stay in memory-mapped Arrow files and are read when they are used. `load_dataset` converts
files to Arrow once, in the cache of `datasets` (HF_DATASETS_CACHE).
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast, overload

from raggedright.agents.agent_session import Task
from raggedright.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from datasets import Dataset


def read_folder(folder: str, options: Mapping[str, object], *, key: str, options_key: str) -> "FolderRows":
    """The rows of a split; `key` and `options_key` are the config keys, for errors."""
    if find_spec("datasets") is None:
        raise ConfigError(f"{key} is {folder}, a folder, which needs datasets; {install_hint('tasks')}")
    for option, value in options.items():
        if option not in ("split", "name"):
            raise ConfigError(f"{options_key}.{option} is unknown for a folder; it takes split and name")
        if not isinstance(value, str):
            raise ConfigError(f"{options_key}.{option} is {value!r:.60}; it takes text")
    split, name = str(options.get("split", "")), str(options.get("name", ""))
    try:
        splits = _splits(folder, name)
    except Exception as error:  # datasets, pyarrow and the folder's files raise many types
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"{key} is {folder}, which is no folder of a dataset ({type(error).__name__}: {cause:.300}); give one of "
            "save_to_disk, or one with Parquet or JSONL files"
        ) from error
    if len(splits) > 1 and not split:
        raise ConfigError(f"{key} is {folder}, which has splits {', '.join(splits)}; set {options_key}.split to one")
    return FolderRows(_part(splits, split, f"{options_key}.split", folder))


def _splits(folder: str, name: str) -> "Mapping[str, Dataset]":
    """All splits of a folder; a folder without splits has one that is called train."""
    import datasets

    path = Path(folder)
    with_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(folder)
        else:
            local = datasets.DownloadConfig(local_files_only=True)
            loaded = datasets.load_dataset(str(path.absolute()), name=name or None, download_config=local)
    finally:
        if with_bars:
            datasets.enable_progress_bars()
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    return cast("Mapping[str, Dataset]", {str(split): rows for split, rows in splits.items()})


def _part(splits: "Mapping[str, Dataset]", split: str, key: str, folder: str) -> "Dataset":
    """The rows that a split's name, or a part such as "train[:90%]", stands for."""
    from datasets import ReadInstruction

    if not split:
        return next(iter(splits.values()))
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"{key} is {split!r:.60} ({error}); {folder} has {', '.join(splits)}, or a part such as 'train[:90%]'"
        ) from None
    if len(parts) > 1:
        raise ConfigError(f"{key} is {split!r:.60}; it takes one split")
    (part,) = parts
    rows = splits[part.splitname]
    if part.from_ >= part.to:
        raise ConfigError(f"{key} is {split!r:.60}, which has no rows; {part.splitname} has {len(rows):,}")
    return rows.select(range(part.from_, part.to))


class FolderRows(Sequence[Task]):
    """The rows of a dataset as tasks; the field uid, or the number of the row, names each."""

    def __init__(self, rows: "Dataset") -> None:
        self._rows = rows
        self.uids = rows["uid"] if "uid" in rows.column_names else range(len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return Task(uid=str(self.uids[index]), data=self._rows[index])
