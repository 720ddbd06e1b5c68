# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The installed verl has all hooks that the plug-in uses; a verl that lacks one is refused with a clear error."""

import sys

import pytest

from raggedright.verl import contract

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_installed_verl_has_every_hook():
    contract.check_contract()
    assert contract.untested_versions() == []


@pytest.mark.parametrize(
    ("hook", "parameters", "message"),
    [
        (
            "verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_rows",
            (),
            "has no verl.trainer.ppo.v1.trainer_base.PPOTr",
        ),
        ("verl.trainer.ppo.v3:PPOTrainer", (), "has no verl.trainer.ppo.v3.PPOTrainer"),
        ("verl.trainer.ppo.core_algos:kl_penalty", ("weights",), "kl_penalty takes no weights"),
    ],
)
def test_a_missing_hook_is_an_error_that_names_it(hook, parameters, message):
    with pytest.raises(contract.ContractError) as error:
        contract.check_contract({hook: parameters})
    assert message in str(error.value)
    assert "verl 0.9.1" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_worker_that_does_not_read_our_settings_is_refused(monkeypatch):
    monkeypatch.setattr(contract, "WORKER_READS", ("num_mini_batches",))
    with pytest.raises(contract.ContractError, match="does not read num_mini_batches"):
        contract.check_contract({})


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(contract, "VERL_VERSIONS", ("0.8.0",))
    assert contract.untested_versions() == ["verl 0.9.1 is installed; the plug-in was tested with 0.8.0"]


def test_importing_the_plug_in_replaces_nothing_of_verl():
    """So verl's own tests are not affected: the plug-in only adds three trainers and one estimator to registries."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    modes = {"sync", "colocate_async", "separate_async"}
    assert set(TRAINER_REGISTRY) == modes | {f"raggedright_{mode}" for mode in modes}
    assert set(ADV_ESTIMATOR_REGISTRY) - {member.value for member in AdvantageEstimator} == {"raggedright_sessions"}
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "verl"]
    assert len(modules) > 100
    for module in modules:
        for name, value in vars(module).items():
            members = [value, *vars(value).values()] if isinstance(value, type) else [value]
            for member in members:
                assert not str(getattr(member, "__module__", "")).startswith("raggedright"), f"{module.__name__}.{name}"
