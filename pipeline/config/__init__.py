"""YAML → frozen types. `load_config` is the one way in.

file, environment, --set ─▶ load ─▶ suggest (unknown keys) ─▶ types (every key) ─▶ rules (between keys) ─▶ Config
"""

from sluice.pipeline.config.load import load_config, override, resolved_yaml
from sluice.pipeline.config.types import Config

__all__ = ["Config", "load_config", "override", "resolved_yaml"]
