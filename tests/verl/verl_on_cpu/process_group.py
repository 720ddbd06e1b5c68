"""The ranks' process group, made when this module is loaded in a process that has a rank.

verl would ask torch for the backends "cpu:gloo,<device>:<backend>", which torch refuses when the device is the CPU,
too. It asks only where there is no group yet, so there is one.
"""

import os

import torch.distributed

if "RANK" in os.environ and "MASTER_ADDR" in os.environ and not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")
