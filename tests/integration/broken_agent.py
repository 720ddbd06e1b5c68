"""A module of a user's that cannot be imported."""

raise RuntimeError("the key of the sandbox is not set")
