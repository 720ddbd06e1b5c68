"""The config of a training run: one TOML file, any key of it from the command line. Light: no torch."""

from raggedright.config.load import dump_config, load_config
from raggedright.config.schema import Config

__all__ = ["Config", "dump_config", "load_config"]
