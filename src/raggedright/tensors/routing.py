"""Routers of a mixture of experts: which experts a pass chose, and passes that choose recorded ones again.

Replay keeps the choice and nothing else: the recorded experts are weighed by the current router's logits, so that
gradients reach the router as ever. A position without a record routes naturally. Invariant: replaying what the model
would have chosen anyway changes no bit. It is found out beforehand, not assumed: each router is run on made-up
numbers, and one whose weights no rule here derives from its logits and its choice is refused.

The surprise: hooks are there only inside a `with`. Activation checkpointing runs the routers again in the backward
pass, which must therefore be inside, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from raggedright.errors import ConfigError, RowsError

NOT_ROUTED = -1
"""Stands for an expert at a position that was never routed."""

Rule = Callable[[Tensor, Tensor], Tensor]  # weights of chosen experts [N, topk], from logits [N, experts] and choice
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # as families call them
_TRIED_TOKENS = 64


def routing_dtype(num_experts: int) -> torch.dtype:
    """The smallest type for an expert's number that also has NOT_ROUTED."""
    return next(t for t in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(t).max)


def fill_up(experts: Tensor, length: int) -> Tensor:
    """A row's experts with NOT_ROUTED for the tokens at its end that no pass has read."""
    filled = experts.new_full((length, *experts.shape[1:]), NOT_ROUTED)
    filled[: len(experts)] = experts
    return filled


def is_routed(experts: Tensor) -> Tensor:
    """Which positions of [..., topk] have a record."""
    return (experts != NOT_ROUTED).all(-1)


class Routers:
    """A model's routers in the order of its layers; make one with `find_routers`."""

    def __init__(self, modules: list[nn.Module], rule: Rule, num_experts: int, topk: int) -> None:
        self._modules, self._rule = modules, rule
        self.num_layers, self.num_experts, self.topk = len(modules), num_experts, topk

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Note the experts of the pass inside; the call gives them flat, [tokens, layers, topk]."""
        chosen: list[Tensor] = []

        def note(_layer: int, _router: nn.Module, _inputs: object, output: Sequence[Tensor]) -> None:
            chosen.append(output[2])

        with self._hooked(note):
            yield lambda: torch.stack(chosen, dim=1).to(routing_dtype(self.num_experts))

    @contextmanager
    def replaying(self, routing: Tensor | None) -> Iterator[list[Tensor]]:
        """Choose recorded experts, [..., layers, topk] over the pass's tokens, in all passes inside.

        The list has each layer's logits once the first pass is over, with their graph. Without a routing, all tokens
        route naturally.
        """
        recorded = None if routing is None else self.of_layers(routing)
        logits: list[Tensor] = []

        def replay(
            layer: int, _router: nn.Module, _inputs: object, output: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor, Tensor] | None:
            of_layer, weights, natural = output
            if layer == len(logits):  # not when it runs again to recompute activations
                logits.append(of_layer)
            if recorded is None:
                return None
            chosen = torch.where(is_routed(recorded[layer])[:, None], recorded[layer], natural)
            return of_layer, self._rule(of_layer, chosen).to(weights.dtype), chosen

        with self._hooked(replay):
            yield logits

    @contextmanager
    def _hooked(self, hook: Callable[[int, nn.Module, object, Sequence[Tensor]], object]) -> Iterator[None]:
        handles = [module.register_forward_hook(partial(hook, layer)) for layer, module in enumerate(self._modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def of_layers(self, routing: Tensor) -> list[Tensor]:
        """A routing [..., layers, topk] as one flat [tokens, topk] for each layer."""
        if routing.shape[-2:] != (self.num_layers, self.topk):
            raise RowsError(
                f"routed_experts has {tuple(routing.shape[-2:])} layers and experts a token and the model "
                f"{(self.num_layers, self.topk)}; they were recorded with another model"
            )
        return list(routing.flatten(0, -3).unbind(1))


def find_routers(model: nn.Module) -> Routers | None:
    """The routers of a model, None if it has no experts; a ConfigError where they are not understood."""
    modules = _router_modules(model)
    if not modules:
        return None
    found = {type(module).__name__: _understand(module) for module in modules}
    unknown = [name for name, known in found.items() if known is None]
    known = [known for known in found.values() if known is not None]
    if unknown:
        raise _not_understood(model, f"{unknown[0]} does not weigh its experts by a softmax over its logits")
    if len(set(known)) > 1:
        raise _not_understood(model, "layers differ in their number of experts, or in how they choose them")
    return Routers(modules, *known[0])


def _not_understood(model: nn.Module, why: str) -> ConfigError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return ConfigError(
        f"the experts of model type {kind!r} cannot be recorded or replayed: {why}; "
        "set experts.replay = false and experts.balance_coef = 0"
    )


def _router_modules(model: nn.Module) -> list[nn.Module]:
    """What transformers itself takes router logits from."""
    recorders = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            given = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
            recorders += given if isinstance(given, list | tuple) else [given]
    kinds = {getattr(recorder, "target_class", recorder) for recorder in recorders}
    if kinds:
        return [module for module in model.modules() if type(module) in kinds]
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(model, PreTrainedModel) and config is not None else None
    counts = [count for name in _COUNTS if isinstance(count := getattr(text, name, None), int)]
    if max(counts, default=0) > 1:
        raise _not_understood(model, "transformers does not say which of its modules are routers")
    return []


def _understand(router: nn.Module) -> tuple[Rule, int, int] | None:
    """The rule of a router, its number of experts and how many it chooses.

    In float32, too, because rounding to half precision makes rules alike.
    """
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    tries = [_try(router, weight, dtype) for dtype in {torch.float32, weight.dtype}]
    for rule in _RULES:
        if all(t is not None and torch.equal(rule(t[0], t[2]).to(t[1].dtype), t[1]) for t in tries):
            assert tries[0] is not None
            return rule, len(weight), tries[0][2].shape[1]
    return None


@torch.no_grad()
def _try(router: nn.Module, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits, weights and choice of a router for made-up tokens, or None where that is not what it gives.

    Its weights are made up, too: its own may be sharded, or all zero.
    """
    made = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).to(weight.device, dtype)

    parameters = {name: numbers(*parameter.shape) for name, parameter in router.named_parameters()}
    parameters["weight"] = 2 * parameters["weight"] / weight.shape[1] ** 0.5
    try:
        output = functional_call(router, parameters, (numbers(_TRIED_TOKENS, weight.shape[1]),))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other inputs
        return None
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return None
    logits, weights, chosen = output
    fits = chosen.dtype is torch.int64 and chosen.shape == weights.shape and chosen.dim() == 2
    return (logits, weights, chosen) if fits and logits.shape == (_TRIED_TOKENS, len(weight)) else None


def _softmax_of_all(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)


def _share_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = _softmax_of_all(logits, chosen)
    return weights / weights.sum(dim=-1, keepdim=True)


def _softmax_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, chosen), dim=-1)


_RULES: tuple[Rule, ...] = (_softmax_of_all, _share_of_chosen, _softmax_of_chosen)
