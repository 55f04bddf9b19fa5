"""Which configuration the pages show, and that they say which."""

from __future__ import annotations

from pathlib import Path

from sluice.consumers.dashboard.monitor import RunConfig
from sluice.pipeline.config.types import Config, ProducerConfig
from sluice.pipeline.run.provenance import store


def test_the_run_s_own_configuration_is_shown_as_it_is_now(tmp_path: Path) -> None:
    given = Config(run="r", run_dir=str(tmp_path))
    shown = RunConfig(given, tmp_path / "r")
    config, origin = shown.read()
    assert (config, "the run has no config.resolved.yaml" in origin) == (given, True)
    for size in (4, 16):
        file = store(Config(run="r", producer=ProducerConfig(group_size=size)), tmp_path / "r")
        config, origin = shown.read()
        assert (config.producer.group_size, "as the run resolved them" in origin) == (size, True)
        assert shown.read().config is config, "read once"
    file.write_text("nonsense: 1")
    config, origin = shown.read()
    assert (config, "cannot be read" in origin, "nonsense" in origin) == (given, True, True)
