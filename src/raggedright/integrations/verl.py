# pyright: reportMissingImports=false
"""The former import path of `raggedright.verl`, kept for environments that set VERL_USE_EXTERNAL_MODULES to it."""

from raggedright.verl import RaggedRightColocateAsync, RaggedRightSeparateAsync, RaggedRightSync

__all__ = ["RaggedRightColocateAsync", "RaggedRightSeparateAsync", "RaggedRightSync"]
