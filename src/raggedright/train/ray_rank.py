"""One rank of a run on Ray: Ray Train calls this in each of its workers, and forms the process group before."""

import os
import sys
from pathlib import Path

import ray
import ray.train
import ray.train.torch

from raggedright.errors import ConfigError
from raggedright.train.rank import CONFIG_FILE, run_rank
from raggedright.train.world import TrainError


def run_on_ray(given: dict[str, str]) -> None:
    """Train as this worker's rank, in the driver's working folder and with its modules where this machine has them."""
    context, folder = ray.train.get_context(), Path(given["folder"])
    if os.path.isdir(given["working_folder"]):
        os.chdir(given["working_folder"])
    sys.path += [path for path in given["path"].split(os.pathsep) if path not in sys.path and os.path.isdir(path)]
    if not (folder / CONFIG_FILE).is_file():
        raise TrainError(
            f"there is no {folder / CONFIG_FILE} on the machine {ray.util.get_node_ip_address()}; out must be a folder "
            "on storage that all machines share"
        )
    check_shared(given["store"], on_this_machine=context.get_local_world_size(), in_all=context.get_world_size())
    device = ray.train.torch.get_device()
    run_rank(folder, device if device.type == "cuda" else None)


def check_shared(store: str, *, on_this_machine: int, in_all: int) -> None:
    """Refuse SQLite's file where not all ranks are on one machine: its log does not work over a network."""
    if store == "sqlite" and on_this_machine < in_all:
        raise ConfigError(
            f"store.backend is sqlite and only {on_this_machine} of {in_all} ranks are on this machine; set "
            "store.backend to transfer_queue, or parallel.placement to pack"
        )
