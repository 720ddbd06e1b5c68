# pyright: reportMissingImports=false
"""A rollout with the interface of verl's servers: one actor per replica generates with raggedright's local engine.

`LocalReplica` starts the server; `LocalRollout` runs in the training workers and, on the replica's first rank, sends
the full weights after every round. All ranks read them, because gathering shards is a collective.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from raggedright.rollout.engine import EngineContext, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine

NAME = "raggedright_local"


class LocalServer:
    """The methods that verl calls on a server, for a model in this process."""

    def __init__(self, path: str, *, response_length: int) -> None:
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._engine = LocalEngine(EngineContext(model=model, pad_token_id=tokenizer.pad_token_id, shared=False))
        self._stop_ids = frozenset({tokenizer.eos_token_id})
        self._response_length = response_length

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict, **media: object
    ) -> TokenOutput:
        """The continuation of a prompt; its randomness comes with the request, so that no order of requests matters."""
        top_k = sampling_params.get("top_k", -1)
        sampling = Sampling(
            max_tokens=sampling_params.get("max_tokens", self._response_length),
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(top_k, 0),
            stop_ids=self._stop_ids,
        )
        made = await self._engine.generate(Request(ids=prompt_ids, sampling=sampling, noise=sampling_params["noise"]))
        return TokenOutput(
            token_ids=made.ids,
            log_probs=made.log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": made.weight_version},
        )

    async def update_weights(self, weights: list[tuple[str, Tensor]], step: int) -> None:
        """Generate with these weights from now on."""
        self._engine.update_weights(weights, version=step)

    async def wake_up(self) -> None:
        """Nothing was released."""

    async def sleep(self) -> None:
        """A CPU's memory is not shared out between training and generation."""


class LocalReplica(RolloutReplica):
    """One server for all the ranks of a replica."""

    async def launch_servers(self) -> None:
        """Start the actor that generates, by a name that the workers know."""
        self._server_address = _server_name(self.replica_rank)
        self._server_handle = (
            ray.remote(LocalServer)
            .options(name=self._server_address, max_concurrency=self.max_concurrency, num_cpus=1)
            .remote(self.model_config.path, response_length=self.config.response_length)
        )
        self.servers = [self._server_handle]


class LocalRollout(BaseRollout):
    """The training workers' end of a replica."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int,
        **unused: object,
    ) -> None:
        """Send the full weights to the replica's server."""
        full = [(name, tensor.detach()) for name, tensor in weights]
        if self.device_mesh["infer_tp"].get_local_rank() == 0:
            server: Any = ray.get_actor(_server_name(self.device_mesh["dp"].get_local_rank()))
            await server.update_weights.remote(full, global_steps)
        await asyncio.to_thread(torch.distributed.barrier)


def _server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


# verl has a registering function for replicas, and a plain table for their other end.
RolloutReplicaRegistry.register(NAME, lambda: LocalReplica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.LocalRollout"
