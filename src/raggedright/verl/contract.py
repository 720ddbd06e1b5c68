"""The hooks of verl and TransferQueue that the plug-in uses, checked on import, not when step 400 needs them.

A hook is a dotted name and the parameters that we call it with, or override. A newer verl that keeps them works; the
versions below are the ones that the tests were run with.
"""

import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata

from raggedright.errors import RaggedRightError

VERL_VERSIONS = ("0.9.1",)
TRANSFER_QUEUE_VERSIONS = ("0.1.11",)

_BASE = "verl.trainer.ppo.v1.trainer_base"
_TRAINER = f"{_BASE}:PPOTrainer"
_CLIENT = "transfer_queue.client:TransferQueueClient"
HOOKS: Mapping[str, tuple[str, ...]] = {
    f"{_BASE}:register_trainer": ("name",),
    f"{_TRAINER}.__init__": ("self", "config"),
    f"{_TRAINER}._setup": ("self",),
    f"{_TRAINER}._balance_batch": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_old_log_prob": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_ref_log_prob": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_values": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_advantage": ("self", "batch", "metrics"),
    f"{_TRAINER}._update_critic": ("self", "batch", "metrics"),
    f"{_TRAINER}._update_actor": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_metrics": ("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
    f"{_TRAINER}._log_rollout_data": ("self", "batch", "timing_raw", "rollout_data_dir"),
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync": (),
    "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync": (),
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync": (),
    "verl.trainer.ppo.core_algos:register_adv_est": ("name_or_enum",),
    "verl.trainer.ppo.core_algos:get_adv_estimator_fn": ("name_or_enum",),
    "verl.trainer.ppo.core_algos:get_policy_loss_fn": ("name",),
    "verl.trainer.ppo.core_algos:kl_penalty": ("logprob", "ref_logprob", "kl_penalty"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor": ("self", "data"),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("self", "data"),
    "verl.workers.utils.padding:no_padding_2_padding": ("tensor", "data"),
    "verl.utils.metric:Metric.aggregate_dp": ("metric_lists",),
    "verl.utils.metric:reduce_metrics": ("metrics",),
    "verl.utils.py_functional:rename_dict": ("data", "prefix"),
    "verl.utils.seqlen_balancing:log_seqlen_unbalance": ("seqlen_list", "partitions", "prefix"),
    "verl.utils.tensordict_utils:list_of_dict_to_tensordict": ("list_of_dicts",),
    "verl.utils.config:omega_conf_to_dataclass": ("config",),
    "transfer_queue:kv_batch_get": ("keys", "partition_id", "select_fields"),
    "transfer_queue:kv_batch_put": ("keys", "partition_id", "fields", "tags"),
    "transfer_queue:get_client": (),
    f"{_CLIENT}.kv_retrieve_meta": ("self", "keys", "partition_id"),
    f"{_CLIENT}.get_production_status": ("self", "data_fields", "partition_id"),
    f"{_CLIENT}._get_partition_meta": ("self", "partition_id"),
    f"{_CLIENT}._run_coroutine": ("self", "coro"),
    "transfer_queue:KVBatchMeta.select_keys": ("self", "keys_to_select"),
}
WORKER_READS = ("num_mini_batch", "mini_batch_size", "epochs", "dataloader_kwargs")
"""Settings that verl's worker must read from a batch; only its source shows whether it does."""


class ContractError(RaggedRightError, ImportError):
    """The installed verl lacks something that the plug-in needs."""


def check_contract(hooks: Mapping[str, tuple[str, ...]] = HOOKS) -> None:
    """Raise an error that names the first hook that the installed verl lacks."""
    installed = f"verl {_version('verl')} with TransferQueue {_version('TransferQueue')}"
    remedy = f"raggedright's plug-in was tested with verl {' and '.join(VERL_VERSIONS)}: install that one"
    for hook, parameters in hooks.items():
        try:
            function = _find(hook)
        except (ImportError, AttributeError) as error:
            raise ContractError(f"{installed} has no {hook.replace(':', '.')} ({error}); {remedy}") from None
        missing = [name for name in parameters if name not in _parameters(function)]
        if missing:
            raise ContractError(f"{installed}: {hook.replace(':', '.')} takes no {', '.join(missing)}; {remedy}")
    worker = importlib.import_module("verl.workers.engine_workers").TrainingWorker
    source = inspect.getsource(inspect.unwrap(worker.train_mini_batch))
    for name in WORKER_READS:
        if f'"{name}"' not in source:
            raise ContractError(
                f"{installed}: TrainingWorker.train_mini_batch does not read {name} from its batch; {remedy}"
            )


def untested_versions() -> list[str]:
    """A warning for each package that is installed in a version that the tests were not run with."""
    tested = {"verl": VERL_VERSIONS, "TransferQueue": TRANSFER_QUEUE_VERSIONS}
    return [
        f"{name} {_version(name)} is installed; the plug-in was tested with {' and '.join(versions)}"
        for name, versions in tested.items()
        if _version(name) not in versions
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _find(hook: str) -> object:
    module, _, path = hook.partition(":")
    value: object = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _parameters(function: object) -> set[str]:
    """The parameters of a function, without its decorators."""
    return set(inspect.signature(inspect.unwrap(function)).parameters) if callable(function) else set()
