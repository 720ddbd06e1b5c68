"""Errors that a user can mend. Each is one sentence: the numbers, the cause, the remedy, and the key or row."""


class RaggedRightError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RaggedRightError):
    """A setting is wrong, or does not fit the others."""


class RowsError(RaggedRightError):
    """A row, or the file it came from, is wrong."""
