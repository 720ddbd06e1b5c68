"""What commands say in sentences: whole words on a terminal, and whole lines in a pipe."""

from io import StringIO

from rich.console import Console

from raggedright.report.text import print_text

SENTENCE = "warning: the batch has 6 prompts and batch_size is 2; set [bold]batch_size[/] to 6 :smile:"


def printed(text: str, *, terminal: bool, width: int = 30) -> str:
    out = StringIO()
    print_text(Console(file=out, force_terminal=terminal, width=width, color_system=None), text)
    return out.getvalue()


def test_a_terminal_gets_lines_of_whole_words_within_its_width():
    lines = printed(SENTENCE, terminal=True).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 30
    assert " ".join(line.rstrip() for line in lines) == SENTENCE


def test_the_lines_of_an_indented_sentence_are_indented():
    assert printed("two faults:\n  one of them\n  the other of them", terminal=True, width=14).splitlines() == [
        "two faults:",
        "  one of them",
        "  the other of",
        "  them",
    ]


def test_a_path_longer_than_the_terminal_stays_whole():
    path = "/" + "folder/" * 10 + "report.html"
    assert path in printed(f"report: {path}", terminal=True)


def test_a_pipe_gets_the_sentence_on_one_line():
    assert printed(SENTENCE, terminal=False) == SENTENCE + "\n"


def test_escape_sequences_reach_neither():
    assert "\x1b" not in printed("a \x1b[2J b", terminal=True) + printed("a \x1b[2J b", terminal=False)
