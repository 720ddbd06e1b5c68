# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The installed verl has what the plug-in uses; one that lacks a hook is refused in one clear sentence."""

import pytest

from raggedright.integrations.verl import contract

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_installed_verl_has_every_hook():
    contract.check_contract()
    assert contract.untested_versions() == []


@pytest.mark.parametrize(
    ("hook", "parameters", "sentence"),
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
def test_a_missing_hook_is_one_sentence(hook, parameters, sentence):
    with pytest.raises(contract.ContractError) as told:
        contract.check_contract({hook: parameters})
    assert sentence in str(told.value)
    assert "verl 0.9.1" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_worker_that_does_not_read_our_settings_is_refused(monkeypatch):
    monkeypatch.setattr(contract, "WORKER_READS", ("num_mini_batches",))
    with pytest.raises(contract.ContractError, match="does not read num_mini_batches"):
        contract.check_contract({})


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(contract, "VERL_VERSIONS", ("0.8.0",))
    assert contract.untested_versions() == ["verl 0.9.1 is installed; the plug-in was tested with 0.8.0"]
