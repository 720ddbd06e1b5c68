"""LoRA: adapters of PEFT inside the actor, which stays the model of transformers that it was.

PEFT replaces linear layers in place by layers that hold the old one and an adapter. No wrapper surrounds the model, so
its signature, config, blocks and embeddings are those that every other module knows.

Invariants: only adapters train, and no weight of the base changes by one bit; adapters start from the seed alone, with
no effect on the model; with `adapter_off` the model computes what the base does, so it is its own reference. Adapters
have the dtype of the model, but float32 in a bfloat16 model: small steps would be lost in the rounding of bfloat16.

The input embeddings and the output head are never adapted: other modules use them as plain layers.
"""

import copy
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from raggedright.config.sections import Lora
from raggedright.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_NAME = "default"  # PEFT's name for an adapter without a name
_NOTHING_HIT = "no module was matched|no parameter was matched|no modules were excluded"  # warnings of PEFT


def add_adapter(model: nn.Module, lora: Lora, *, seed: int, base: str | None = None) -> None:
    """Put adapters into a model and freeze everything else; `base` is the directory that the model came from."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(f"lora.rank is {lora.rank} and needs {error.name}; {install_hint('lora')}") from None

    assert isinstance(model, PreTrainedModel)
    assert lora.rank is not None
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        target_parameters=lora.target_parameters,
        use_rslora=lora.use_rslora,
        init_lora_weights="gaussian" if lora.init_lora_weights == "gaussian" else True,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    torch.manual_seed(seed + 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", f".*({_NOTHING_HIT})")
            peft.inject_adapter_in_model(config, model, _NAME)
    except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, re.error, Warning) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"lora: PEFT cannot adapt model type {model.config.model_type!r} ({cause:.300}); change "
            "lora.target_modules, lora.exclude_modules or lora.target_parameters"
        ) from None
    _check_targets(model, lora, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()  # the new modules too


def _check_targets(model: PreTrainedModel, lora: Lora, config: Any) -> None:
    """Refuse an adapted embedding or head, and a name in the config that hit nothing."""
    layers = lora_layers(model)
    plain = {id(model.get_input_embeddings()): "input embeddings", id(model.get_output_embeddings()): "output head"}
    for name, layer in layers.items():
        if part := plain.get(id(layer)):
            raise ConfigError(
                f"lora.target_modules hits {name}, the model's {part}, which cannot be adapted; leave {name} out of "
                "it, or add it to lora.exclude_modules"
            )
    # PEFT moves names of fused experts from target_modules to target_parameters, and nests a module's wrappers.
    parts = [(name.replace(".base_layer", ""), getattr(layer, "parameter_name", "")) for name, layer in layers.items()]
    hit = [".".join(filter(None, part)) for part in parts]
    for key, kept in (("target_modules", config.target_modules), ("target_parameters", config.target_parameters)):
        given = getattr(lora, key)
        for end in given if isinstance(given, list) else ():
            if end in (kept or ()) and not _any_ends(hit, end):
                raise ConfigError(
                    f"lora.{key} has {end!r}, which no layer of model type {model.config.model_type!r} is called that "
                    "PEFT can adapt; remove it"
                )


def _any_ends(names: Iterable[str], end: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for name in names)


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """The adapted layers of a model by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Passes inside are those of the base model.

    PEFT's own switch also clears requires_grad, which FSDP2 reads when it first gathers a parameter.
    """
    layers = lora_layers(model).values()
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_copy(model: nn.Module) -> nn.Module:
    """A copy of the model with its adapters added to its weights; the copy has no trace of PEFT."""
    merged = copy.deepcopy(model)
    layers = lora_layers(merged)
    for layer in layers.values():
        layer.merge()
    for name, layer in layers.items():
        if not _is_nested(name, layers):
            merged.set_submodule(name, layer.get_base_layer())
    del merged.peft_config
    return merged


def _is_nested(name: str, layers: Mapping[str, object]) -> bool:
    """Whether a layer is the base of another adapter: each adapted parameter of a module has a wrapper of its own."""
    return name.endswith(".base_layer") and name.removesuffix(".base_layer") in layers


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapter as a folder that `PeftModel.from_pretrained` reads."""
    from peft import get_peft_model_state_dict

    config: Any = model.peft_config
    values = config[_NAME].to_dict() | {"inference_mode": True}
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    weights = get_peft_model_state_dict(model, adapter_name=_NAME)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(values, indent=2, sort_keys=True))
    save_file(
        {f"base_model.model.{name}": weight.contiguous() for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
