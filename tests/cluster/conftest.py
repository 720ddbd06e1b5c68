"""One Ray cluster of two nodes on this machine, bound to loopback, for all tests that ask for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.runs import make_run
from raggedright.train.launch import launch

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator["Cluster"]:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray binds to loopback then
    os.environ.update({"RAY_worker_niceness": "0"})  # of 15, which is to wait for all other tests
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # an actor less to start
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 4})
    add_node(made)
    yield made
    made.shutdown()


def add_node(cluster: "Cluster") -> None:
    """The second node: it takes a rank and one of the store's actors."""
    cluster.add_node(**NODE, num_cpus=2)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by the local launcher, on one rank, never held."""
    config = make_run(tmp_path_factory.mktemp("alone") / "run")
    (config.out / "go").touch()
    launch(config)
    return config.out
