"""What subcommands share: how one is declared, and the numbers that their options take."""

import argparse

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_parser(
    commands: "Commands[argparse.ArgumentParser]", name: str, *, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples as they are written."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between."""
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        message = f"{text!r} is not a list of whole numbers of at least 1, such as 1,2,4"
        raise argparse.ArgumentTypeError(message) from None
