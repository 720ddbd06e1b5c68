"""`raggedright plan` as a user meets it: in a process of its own."""

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from raggedright.cli import main

VERIFICATION = ("--dp", "2", "--batch-size", "45", "--mini-batch-size", "15", "--rollout-n", "8")


def raggedright(*args: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([sys.executable, "-m", "raggedright", *args], input=data, capture_output=True, timeout=60)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def jsonl(num_rows: int = 361) -> str:
    """361 rows of 360 sessions of 45 prompts."""
    records = (
        {
            "prompt": f"p{i % 360 // 8}", "session": i % 8, "trajectory": i // 360,
            "prompt_tokens": 5 + i % 11, "response_tokens": 3 + i * 7 % 40,
        }
        for i in range(num_rows)
    )  # fmt: skip
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(jsonl())
    return str(path)


def plan_json(*args: str, stdin: str = "") -> dict:
    done = raggedright("plan", *args, "--format", "json", stdin=stdin)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_much_padding_is_one_warning_in_the_words_of_the_command_line(rows_file):
    options = ("--dp", "257", "--batch-size", "45", "--mini-batch-size", "15", "--rollout-n", "8", "--align", "lcm")
    done = raggedright("plan", rows_file, *options, "--compare")
    assert done.returncode == 0
    assert done.stderr.count("warning: the plan has 30,479 padding rows for 361 rows") == 1
    assert "--dp 257" in done.stderr
    assert "--align lcm pads to" in done.stderr
    assert "set --align steps" in done.stderr
    done = raggedright("plan", rows_file, *options[:-2], "--dp", "2", "--compare")
    assert done.stderr == ""


def test_the_remedies_of_an_error_are_words_of_the_command_line(rows_file, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", rows_file, *VERIFICATION, "--micro-batch-tokens", "10"]) == 1
    error = capsys.readouterr().err
    assert "or set --over-long alone or drop" in error
    assert " = " not in error


def test_json_holds_the_whole_plan(rows_file):
    plan = plan_json(rows_file, *VERIFICATION, "--critic-mini-batch-size", "9", "--epochs", "2")
    assert (plan["rows"], plan["align"], plan["multiple"]) == (361, "steps", None)
    assert plan["seconds"] > 0
    assert plan["imbalance"]["rank"] >= 1
    assert plan["imbalance"]["slot"] >= 1
    assert {role: len(part["steps"]) for role, part in plan["roles"].items()} == {
        "actor": 6,
        "critic": 10,
        "forward": 1,
    }
    for role, part in plan["roles"].items():
        for step in part["steps"]:
            micro_batches = [m for rank in step["ranks"] for m in rank["micro_batches"]]
            rows = [row for m in micro_batches for row in m["rows"]]
            assert step["rows"] == len(rows)
            assert step["padding_rows"] == sum(m["padding_rows"] for m in micro_batches)
            assert step["skipped"] is False
            assert all((row["weight"] > 0) == (role != "forward") for row in rows)
    keys = [
        r["key"]
        for s in plan["roles"]["actor"]["steps"]
        for k in s["ranks"]
        for m in k["micro_batches"]
        for r in m["rows"]
    ]
    assert len(keys) == 2 * 361
    assert len(set(keys)) == 361
    assert "p0/0/1" in keys


def test_the_origins_rule_pads_to_the_least_common_multiple(rows_file):
    plan = plan_json(rows_file, *VERIFICATION, "--align", "lcm")
    assert (plan["multiple"], plan["padding_rows"], plan["padding_tokens"]) == (120, 119, 238)
    plan = plan_json(rows_file, *VERIFICATION, "--align", "lcm", "--critic-mini-batch-size", "9")
    assert plan["multiple"] == 360
    plan = plan_json(rows_file, *VERIFICATION, "--align", "lcm", "--critic-mini-batch-size", "9", "--critic-warm-up")
    assert (plan["multiple"], list(plan["roles"])) == (72, ["critic", "forward"])


def test_standard_input_is_read_for_a_dash(rows_file):
    ours, theirs = plan_json("-", *VERIFICATION, stdin=jsonl()), plan_json(rows_file, *VERIFICATION)
    assert ours["digest"] == theirs["digest"]


def test_the_table_says_what_the_plan_is(rows_file):
    done = raggedright("plan", rows_file, *VERIFICATION, "--compare")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("361", "rank 0", "rank 1", "align steps", "drop the remainder", "rows: 361 = 361 trained"):
        assert words in done.stdout


def test_compare_is_in_the_json_too(rows_file):
    rules = plan_json(rows_file, *VERIFICATION, "--compare")["compare"]
    assert [rule["rule"] for rule in rules][:2] == ["align steps", "align lcm"]


def test_svg_is_a_picture(rows_file):
    done = raggedright("plan", rows_file, *VERIFICATION, "--format", "svg")
    assert done.returncode == 0
    assert ElementTree.fromstring(done.stdout).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("how", [("--format", "table"), ("--format", "json"), ("--format", "svg"), ("--compare",)])
def test_a_file_without_rows_is_bad_input(how):
    done = raggedright("plan", "-", *VERIFICATION, *how, stdin="\n\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "raggedright: standard input has no rows; a line is one row, a JSON object\n"


def test_more_sessions_than_the_command_says_are_told(rows_file):
    done = raggedright("plan", rows_file, *VERIFICATION, "--rollout-n", "2")
    assert done.returncode == 0
    assert "has a prompt of 8 sessions and --rollout-n is 2" in done.stderr


def test_the_command_alone_prints_its_help():
    done = raggedright()
    assert done.returncode == 2
    assert "raggedright COMMAND --help has examples" in done.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "standard input, line 2: not JSON"),
        ("[]", "line 2: [] is not an object"),
        ('{"prompt": "p", "session": 0, "trajectory": 0, "prompt_tokens": 1}', "line 2: field response_tokens is"),
        ('{"prompt": "p0", "session": 0, "trajectory": 0, "prompt_tokens": 1, "response_tokens": 1}',
         "line 2: row p0/0/0 is in line 1 already"),
        ('{"prompt": "p", "session": 0, "trajectory": 0, "prompt_tokens": -1, "response_tokens": 1}',
         "line 2: prompt_tokens is -1;"),
        ('{"prompt": "p", "session": "x", "trajectory": 0, "prompt_tokens": 1, "response_tokens": 1}',
         "line 2: session is 'x'"),
        ('{"prompt": "p", "session": 0, "trajectory": 0, "prompt_tokens": 1, "response_tokens": 1, "loss_tokens": 2}',
         "line 2: loss_tokens is 2 and response_tokens 1"),
        ('{"prompt": "p", "session": 0, "trajectory": 7, "prompt_tokens": 9000, "response_tokens": 120}',
         "row p/0/7 has 9,120 tokens and --micro-batch-tokens is 8,192; raise it to 9,120"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_1(line, sentence):
    done = raggedright("plan", "-", *VERIFICATION, stdin=jsonl(1) + line + "\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "/dev/zero", *VERIFICATION]) == 1
    assert capsys.readouterr().err.startswith("raggedright: /dev/zero, line 1: more than 16,777,216 bytes")


def test_a_file_that_is_not_there_or_not_text_is_bad_input(tmp_path: Path):
    done = raggedright("plan", str(tmp_path / "none.jsonl"), *VERIFICATION)
    assert done.returncode == 1
    assert "No such file or directory; give a file of rows" in done.stderr
    done = raggedright("plan", str(tmp_path), *VERIFICATION)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    done = raggedright("plan", "-", *VERIFICATION, stdin=b"\xff\xfe\x00")
    assert done.returncode == 1
    assert "line 1: not UTF-8 text" in done.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "required: --dp, --batch-size, --mini-batch-size, --rollout-n"),
        ((*VERIFICATION, "--dp", "0"), "argument --dp: '0' is not an integer of at least 1"),
        ((*VERIFICATION, "--align", "gcd"), "invalid choice: 'gcd'"),
        ((*VERIFICATION, "--micro-batch-rows", "8", "--micro-batch-tokens", "8"), "not allowed with"),
        ((*VERIFICATION, "--loss-agg", "seq-mean-token-sum-norm"), "set --loss-norm-tokens"),
        ((*VERIFICATION, "--critic-warm-up"), "--critic-warm-up is given and --critic-mini-batch-size is not set"),
        ((*VERIFICATION, "--compare", "--format", "svg"), "not with --format svg"),
        ((*VERIFICATION, "--seed", "-1"), "seed is -1"),
    ],
)
def test_wrong_usage_is_exit_code_2(args, sentence):
    done = raggedright("plan", "-", *args)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_examples():
    assert "raggedright plan rows.jsonl --dp 2" in raggedright("plan", "--help").stdout


def test_a_reader_that_has_seen_enough_is_no_error(rows_file):
    command = f"{sys.executable} -m raggedright plan {rows_file} {' '.join(VERIFICATION)} --format json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_more_prompts_than_the_batch_has_are_told_of(capsys: pytest.CaptureFixture[str]):
    options = ["--dp", "2", "--batch-size", "2", "--mini-batch-size", "2", "--rollout-n", "4"]
    assert main(["plan", str(Path(__file__).parents[2] / "examples" / "rows.jsonl"), *options]) == 0
    assert "has 6 prompts and --batch-size is 2" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(rows_file: str, closed: str):
    file = "-" if closed == "<&-" else rows_file
    command = [sys.executable, "-m", "raggedright", "plan", file, *VERIFICATION]
    done = subprocess.run(f"{shlex.join(command)} {closed}", shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == (file == "-")
    assert ("standard input has no rows" if file == "-" else "") in done.stderr
    assert len(done.stderr.splitlines()) == (file == "-")
