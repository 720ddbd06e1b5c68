"""Errors that a user can fix. Each is one sentence: the numbers, the cause, the remedy, and the key or row."""


class RaggedRightError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RaggedRightError):
    """A setting is wrong, or does not fit the others."""


class RowsError(RaggedRightError):
    """A row, or the file it came from, is wrong."""


def install_hint(extra: str) -> str:
    """How to install an optional part: raggedright is not on a package index, so pip needs a clone."""
    return f"run pip install '.[{extra}]' in a clone of raggedright"
