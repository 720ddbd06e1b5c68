"""The same training on a Ray cluster: two nodes on this machine, a rank on each, rows in TransferQueue.

A run waits in its second round until half of the sessions are in the store and the others run; then something dies.
Whatever it is, the run goes on from its last checkpoint and ends with the weights of one that nobody touched.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.conftest import add_node
from cluster.runs import PROMPTS, ROUNDS, SESSIONS, kill, launch_and, make_run, on_ray, processes, wait_gone
from parallel.whole_runs import distance, weights_of
from raggedright.errors import ConfigError
from raggedright.report.events import read_events
from raggedright.train.launch import launch
from raggedright.train.world import TrainError

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.filterwarnings("ignore::Warning:ray")]
Said = pytest.CaptureFixture[str]


def reused(folder: Path) -> list[int]:
    """The sessions of each round that were re-used; an error unless every session of every round counts once."""
    rounds = read_events(folder / "events.jsonl").rounds
    assert [each.round for each in rounds] == list(range(1, ROUNDS + 1))
    assert {sum(each.ledger.sessions.values()) for each in rounds} == {PROMPTS * SESSIONS}
    return [each.ledger.reused_sessions for each in rounds]


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_no_finished_session_and_no_bit(
    cluster: "Cluster", alone: Path, tmp_path: Path, capsys: Said
):
    config = make_run(tmp_path / "run", on_ray(str(cluster.address)))

    def end_rank() -> None:
        ranks = processes("RayTrainWorker")
        assert len({rank.ppid() for rank in ranks}) == 2  # each under a node of its own
        kill("RayTrainWorker")
        wait_gone(ranks)

    launch_and(config, end_rank)
    assert reused(config.out) == [0, PROMPTS * SESSIONS // 2, 0]
    assert distance(weights_of(config.out), weights_of(alone)) < 1e-9
    said = capsys.readouterr().out
    assert "died: its worker process has died, on 127.0.0.1" in said
    assert "found the checkpoint of round 1 and 12 of 24 sessions of round 2; 2 of 3 rounds to go" in said
    assert f"round {ROUNDS}/{ROUNDS}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "part"),
    [("SimpleStorageUnit", "TransferQueueStorageUnit#0"), ("TransferQueueController", "TransferQueueController")],
)
def test_a_store_that_loses_a_part_is_started_anew_and_its_sessions_run_again(
    cluster: "Cluster", alone: Path, tmp_path: Path, capsys: Said, process: str, part: str
):
    """TransferQueue 0.1.11 waits ten minutes for a dead storage unit, and for ever for a dead controller."""
    config = make_run(tmp_path / "run", on_ray(str(cluster.address)))
    launch_and(config, lambda: kill(process))
    assert reused(config.out) == [0, 0, 0]
    assert distance(weights_of(config.out), weights_of(alone)) < 1e-9
    said = capsys.readouterr().out
    assert f"{part} died" in said
    assert "started a new one" in said
    assert "found the checkpoint of round 1 and 0 of 24 sessions of round 2" in said


@pytest.mark.slow
def test_a_node_that_is_removed_and_added_back_costs_no_bit(cluster: "Cluster", alone: Path, tmp_path: Path):
    config = make_run(tmp_path / "run", on_ray(str(cluster.address)))
    (node,) = cluster.worker_nodes

    def remove() -> None:
        ranks = processes("RayTrainWorker")
        cluster.remove_node(node, allow_graceful=False)
        wait_gone(ranks)

    launch_and(config, remove, then=lambda: add_node(cluster))
    assert reused(config.out)[1] in (0, PROMPTS * SESSIONS // 2)  # whether a part of the store was on that node
    assert distance(weights_of(config.out), weights_of(alone)) < 1e-9


@pytest.mark.slow
def test_a_cluster_without_room_ends_the_run_with_what_it_needed(cluster: "Cluster", tmp_path: Path):
    changes = on_ray(str(cluster.address), max_restarts=0)
    changes["parallel"] |= {"start_timeout": 20, "cpus_per_rank": 50}
    with pytest.raises(TrainError, match=r"no room for 2 ranks of 50 CPUs and 0 GPUs each in 20 s; add nodes"):
        launch(make_run(tmp_path / "run", {**changes, "store": {"backend": "sqlite"}}))


def test_sqlite_is_refused_where_ranks_are_on_several_machines():
    from raggedright.train.ray_rank import check_shared

    check_shared("sqlite", on_this_machine=2, in_all=2)
    check_shared("transfer_queue", on_this_machine=1, in_all=2)
    with pytest.raises(ConfigError, match=r"sqlite and only 1 of 2 ranks are on this machine; set store.backend"):
        check_shared("sqlite", on_this_machine=1, in_all=2)


def test_what_needs_ray_is_refused_without_it(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"transfer_queue and parallel.launcher local"):
        make_run(tmp_path / "a", {"store": {"backend": "transfer_queue"}})
    with pytest.raises(ConfigError, match=r"Ray gives a rank no GPU; set parallel.gpus_per_rank to 1"):
        make_run(tmp_path / "b", {"parallel": {"launcher": "ray", "device": "cuda"}})
    with pytest.raises(TrainError, match=r"nothing is listening at 127.0.0.1:1; set the address of a running Ray"):
        launch(make_run(tmp_path / "c", on_ray("127.0.0.1:1")))
