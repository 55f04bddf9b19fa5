"""`sluice audit`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Json, Overrides


def audit(
    run: Annotated[str, Parameter(help="The run's directory, or its name under run_dir.")],
    /,
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    tolerance: Annotated[
        float, Parameter(help="Nats that a logprob may be off; the default is for fp32 engines.")
    ] = 1e-4,
    steps: Annotated[str | None, Parameter(help="One step (7) or a range of them (3:10, 3: or :10).")] = None,
    limit: Annotated[int | None, Parameter(help="Audit so many sequences, drawn at random.")] = None,
    seed: Annotated[int, Parameter(help="Of that draw.")] = 0,
    as_json: Json = False,
) -> int:
    """Recompute the stored logprobs of a run by plain forward passes, and say which tokens are right.

    Advantages and masks are computed again too. Needs trainer.keep_rollouts and the weights of the versions; no broker.
    Exit code 1 when a token or an advantage is wrong.

    Example: `sluice audit .sluice/runs/default --limit 200`
    """
    from consumers.audit.run_files import find_run, stored_config
    from pipeline.config import load_config
    from pipeline.errors import ConfigError

    if not 0 < tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be above 0, got {tolerance}")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {limit}")
    given = load_config(config, overrides)
    directory = find_run(run, given)
    settings = stored_config(directory, given, overrides)

    from consumers.audit.run import audit_run
    from consumers.audit.view import print_report
    from pipeline.json_out import print_json

    found = audit_run(directory, settings, tolerance=tolerance, steps=steps, limit=limit, seed=seed)
    if as_json:
        print_json(found)
    else:
        print_report(found, may_be_half=settings.model.dtype != "float32")
    return 1 if found.wrong or found.advantages.wrong else 0
