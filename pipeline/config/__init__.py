"""YAML → frozen types. `load_config` is the one way in."""

from pipeline.config.load import load_config, resolved_yaml
from pipeline.config.types import Config

__all__ = ["Config", "load_config", "resolved_yaml"]
