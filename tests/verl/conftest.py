# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Tests with verl, collected where it is installed; its imports warn about engines that are not installed."""

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("TQ_NUM_THREADS", "2")  # with more threads than cores it warns on every call
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray and TransferQueue on 127.0.0.1 only

# This folder is also called verl, and is imported instead where verl is not installed.
if find_spec("transfer_queue") and find_spec("verl") and getattr(find_spec("verl"), "origin", None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cpu_ranks  # noqa: F401 before verl queries the device
        import torch

        import raggedright.verl  # noqa: F401
    torch.set_num_threads(1)
else:
    names = ("comparison", "contract", "losses", "trainer", "workers")
    collect_ignore = [f"test_{name}.py" for name in names]


@pytest.fixture(scope="session")
def queue() -> Iterator[None]:
    """One Ray with TransferQueue for the whole run."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    # Workers find these modules, and a device, before they import verl.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)])
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_ranks"
    ray.init(address="local", num_cpus=8, num_gpus=2, include_dashboard=False, object_store_memory=256 * 2**20)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()
