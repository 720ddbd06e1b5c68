# pyright: reportMissingImports=false
"""The plug-in for verl: exact batches in verl's own trainers, without patching verl.

    VERL_USE_EXTERNAL_MODULES=raggedright.verl
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=raggedright_sync ...

Importing this module checks that the installed verl has what the plug-in uses (`contract.py`) and registers the
trainers.
"""

import warnings

from raggedright.verl.contract import check_contract, untested_versions

check_contract()
for _warning in untested_versions():
    warnings.warn(_warning, stacklevel=2)

from raggedright.verl.trainer import (  # noqa: E402
    RaggedRightColocateAsync,
    RaggedRightSeparateAsync,
    RaggedRightSync,
)

__all__ = ["RaggedRightColocateAsync", "RaggedRightSeparateAsync", "RaggedRightSync"]
