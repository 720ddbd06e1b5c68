"""What the driver shows of ranks that are elsewhere, and what it says when they fail."""

import json
from pathlib import Path

import pytest

from cluster.runs import make_run
from raggedright.config.schema import Config
from raggedright.train.progress import Follower, NewLines


def write(config: Config, **event: object) -> None:
    with (config.out / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_only_whole_lines_that_are_new_are_read_and_a_file_that_got_shorter_is_read_on(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_text("old\n")
    lines = NewLines(path)
    assert [*lines.read()] == []
    path.write_text("old\none\ntw")
    assert [*lines.read()] == ["one"]
    path.write_text("old\none\n")  # what a rank that starts again does with half a line
    assert [*lines.read()] == []
    path.write_text("old\none\nthree\n")
    assert [*lines.read()] == ["three"]


def test_a_run_is_shown_from_its_events_as_the_first_rank_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = make_run(tmp_path / "run")
    follower = Follower(config)
    follower.poll()
    write(config, event="start", resumed_from=1, sessions_found=7)
    ledger = {"sessions": {"trained": 22, "failed (timed out)": 2}, "rows": {}, "reused_sessions": 7}
    metrics = {"critic/score/mean": 0.5, "perf/tokens_per_second": 1234.0}
    write(config, event="round", round=3, metrics=metrics, rows=51, padding_rows=2, ledger=ledger)
    follower.poll()
    follower.say("the store died")
    write(config, event="eval", round=3, metrics={"eval/score/mean": 0.25})
    follower.close()
    assert capsys.readouterr().out.splitlines() == [
        f"resuming {config.out}: found the checkpoint of round 1 and 7 of 24 sessions of round 2; 2 of 3 rounds to go",
        "round 3/3  score 0.500  51 rows + 2 padding  2 failed  1,234 tokens/s  0:00 left",
        "the store died",
        "round 3  eval/score 0.250",
    ]


@pytest.mark.filterwarnings("ignore::Warning:ray")
def test_of_ranks_that_fail_together_the_nearest_cause_is_told():
    from ray.exceptions import ActorUnavailableError, RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    from raggedright.store.session_store import StoreError
    from raggedright.train.ray_rank import rank_failure_text

    waited = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    died = WorkerHealthCheckFailedError(
        "health check", RayActorError(error_msg="ip: 10.0.0.7 dead because its node has died. See")
    )
    assert rank_failure_text({0: waited, 1: died}) == "rank 1 died: its node has died, on 10.0.0.7"
    lost = StoreError("the store's controller is dead")
    assert rank_failure_text({0: waited, 1: died, 2: lost}) == "rank 2: the store's controller is dead"
    assert rank_failure_text({0: waited}).startswith("rank 0: RuntimeError: Connection closed by peer")
    away = WorkerHealthCheckFailedError("health check", ActorUnavailableError("RpcError: failed to connect", None))
    assert rank_failure_text({0: waited, 1: away}) == "rank 1 died: its process or its node cannot be reached any more"


@pytest.mark.filterwarnings("ignore::Warning:ray")
def test_a_rank_that_died_ends_the_run_with_how_to_resume_it(tmp_path: Path):
    from ray.exceptions import RayActorError
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    from raggedright.store.session_store import StoreError
    from raggedright.train.ray_driver import _run_error

    config = make_run(tmp_path / "run")
    died: Exception = WorkerHealthCheckFailedError(
        "health check", RayActorError(error_msg="because its node has died.")
    )
    assert "run the same command again" in str(_run_error(config, WorkerGroupError("", {1: died})))
    ours = StoreError("the disk is full; make room, then run the same command again")
    assert str(_run_error(config, WorkerGroupError("", {0: ours, 1: died}))).count("run the same command again") == 1
