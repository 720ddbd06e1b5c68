"""`python -m raggedright` and the `raggedright` command: the command line, or which extra it needs."""

import sys

from raggedright.errors import install_hint


def main() -> int:
    """Run the command line; without its packages, say how to install them."""
    try:
        from raggedright.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("raggedright"):
            raise
        print(f"raggedright: the command line needs {error.name}; {install_hint('cli')}", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
