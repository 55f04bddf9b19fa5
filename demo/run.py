"""The demo's composition root: warm start → pipeline (with a kill) → audit → report."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sluice.consumers.run_files import EVALS
from sluice.consumers.training.step_log import read_steps
from sluice.demo import report
from sluice.demo.answers import SHOWN
from sluice.demo.audit import audit, read_summary
from sluice.demo.drill import Drill
from sluice.demo.heldout import SEED, Heldout, record
from sluice.demo.kill_cost import KillCost, kill_cost
from sluice.demo.mid_sequence import mid_sequence
from sluice.demo.report import Report
from sluice.demo.tasks import DemoTask
from sluice.demo.tiny.warm_start import WarmStartProgress
from sluice.pipeline import logs
from sluice.pipeline.config import Config, load_config, override
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.run.stack import run_stack
from sluice.pipeline.status.run_end import refuse_second
from sluice.pipeline.terminal import complain, print_json

SCHEMA = 1
_KEEP_RUNS = 3
_MARK = "demo.mark"  # in the directory of a run that the demo made
_LAST_STEPS = 8  # one alone has few rollouts


@dataclass(frozen=True)
class Options:
    """`prompts` None: as many as the task's configuration says."""

    seed: int
    workers: int
    prompts: int | None
    kill: bool


def run_demo(task: DemoTask, directory: Path, options: Options, *, as_json: bool) -> int:
    """Run it; returns 0 if the run is complete and nothing was lost or trained twice.

    With `as_json` only the summary goes to standard output, and progress to standard error.
    """
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        code, summary = _run(task, directory, options)
    if as_json and summary:
        print_json(summary, SCHEMA)
    return code


def _run(task: DemoTask, directory: Path, options: Options) -> tuple[int, dict[str, Any]]:
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    torch.set_num_threads(task.threads)
    warm = _warm_start(task, directory)
    _prune(directory / "runs", task)
    config = _config(task, directory, warm, options)
    run_dir = Path(config.run_dir) / config.run
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _MARK).touch()
    task.write_data(Path(config.data.path), config.data.limit or 1, options.seed + 1)
    task.write_heldout(Path(config.eval.data), task.num_followed, SEED)
    drill = Drill(task, config, run_dir / EVALS, kill=options.kill)
    pipeline_started = time.monotonic()
    try:
        code = run_stack(
            config,
            title=f"sluice demo · {task.name}",
            watch=drill.watch,
            command=f"sluice run -c {shlex.quote(str(run_dir))}",
        )
    except Exception:
        _report_stopped(task, run_dir, drill, time.monotonic() - pipeline_started)
        raise
    pipeline_s = time.monotonic() - pipeline_started
    if code:
        _report_stopped(task, run_dir, drill, pipeline_s)
        return code, {}
    logs.configure("demo", logging.WARNING)  # what follows is the result
    heldout = Heldout.of(task, warm, _newest_version(run_dir))
    counts = asdict(audit(config, run_dir))
    versions = counts.pop("versions")
    landed = mid_sequence(run_dir) if task.mid_sequence else None
    summary: dict[str, Any] = heldout.scores(task) | counts
    summary |= {"worker_kills": int(drill.kill is not None), "versions": versions}
    summary |= {"mid_sequence_updates": len(landed.versions)} if landed else {}
    summary |= _rollouts(task, run_dir) | _evaluated(task, run_dir)
    summary |= {"pipeline_s": round(pipeline_s, 1), "wall_s": round(time.monotonic() - started, 1)}
    cost = kill_cost_of(task, run_dir, drill)
    summary |= cost_keys(cost)
    told = Report(task, summary, drill, heldout.problems[:SHOWN], cost, landed)
    tell(run_dir, told, heldout, usual=options.prompts is None)
    return 0 if not summary["lost"] and not summary["duplicated"] else 1, summary


def _warm_start(task: DemoTask, directory: Path) -> Path:
    """The warm start is cached, and serves every seed."""
    tty = sys.stderr.isatty()
    last = 0.0

    def show(now: WarmStartProgress) -> None:
        nonlocal last
        if now.step < now.num_steps and time.monotonic() - last < (0.2 if tty else 5.0):
            return
        last = time.monotonic()
        line = f"warm start: step {now.step}/{now.num_steps}  loss {now.loss:.3f}  {now.elapsed_s:.0f} s"
        print(f"\r{line}\x1b[K" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)

    path = task.ensure_warm_start(directory / "cache", show)
    if tty and last:
        print(file=sys.stderr)
    print(f"warm-started model: {path}", file=sys.stderr)
    return path


def _config(task: DemoTask, directory: Path, warm: Path, options: Options) -> Config:
    run = time.strftime(f"{task.name}-%Y%m%d-%H%M%S")
    run_dir = directory / "runs"
    overrides = [
        f"run={run}",
        f"seed={options.seed}",
        f"worker.count={options.workers}",
        override("run_dir", run_dir),
        override("broker.embedded_dir", run_dir / run / "broker"),
        override("model.path", warm),
        override("data.path", run_dir / run / "train.jsonl"),
        override("eval.data", run_dir / run / "heldout" / "heldout.jsonl"),
    ]
    overrides += [] if options.prompts is None else [f"data.limit={options.prompts}"]
    overrides += [override("images.roots", [run_dir / run])] if task.images else []
    config = load_config(task.config_path(), overrides)
    if config.rollout.url is None:
        return config
    gateway, server = _free_ports(2)
    overrides += [f"gateway.port={gateway}", f"rollout_server.port={server}", f"rollout.url=http://127.0.0.1:{server}"]
    return load_config(task.config_path(), overrides)


def _free_ports(count: int) -> list[int]:
    """Unused ports of this host, so that two demos can run side by side."""
    with ExitStack() as scope:
        sockets = [scope.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _rollouts(task: DemoTask, run_dir: Path) -> dict[str, float]:
    """The score of the newest steps' training rollouts."""
    found = [step[task.rollouts.key] for step in read_steps(run_dir / "metrics.jsonl") if task.rollouts.key in step]
    return {"rollouts_last": round(fmean(found[-_LAST_STEPS:]), 4)} if found else {}


def _evaluated(task: DemoTask, run_dir: Path) -> dict[str, float]:
    """What `sluice status` shows under the same name: the run's own evaluation, by the measure of its task."""
    value = read_summary(run_dir).evaluation.values.get(f"eval/{task.metric}")
    return {} if value is None else {f"{task.metric}_evaluated": round(value, 4)}


def tell(run_dir: Path, told: Report, heldout: Heldout, *, usual: bool) -> None:
    """Print the result, and then write the report, which may fail: the run is over, and its result stands."""
    _print(told.task, told.summary, told.cost, usual=usual)
    with _or_note("the report"):
        keep_ends(told.drill, heldout, told.summary["versions"])
        _write_report(run_dir, told)


@contextlib.contextmanager
def _or_note(what: str) -> Generator[None]:
    try:
        yield
    except (OSError, SluiceError) as error:
        complain(f"without {what}: {error}")


def _write_report(run_dir: Path, told: Report) -> None:
    print(f"report: {report.write(run_dir, told)}", file=sys.stderr)


def keep_ends(drill: Drill, heldout: Heldout, last: int) -> None:
    """Add the warm start and the last version to the curve and the answers, where the evaluator came too late."""
    known = {score.version for score in drill.scores()}
    ends = ((0, heldout.before, drill.timeline[0]), (last, heldout.after, drill.timeline[-1]))
    for version, found, moment in ends if drill.timeline else ():
        if version not in known:
            count = drill.task.num_followed
            record(drill.task, drill.evals, version, moment.at, heldout.problems[:count], found[:count])


def _report_stopped(task: DemoTask, run_dir: Path, drill: Drill, pipeline_s: float) -> None:
    """A report of what there is; none if even the run's last state isn't known."""
    if not (run_dir / "summary.json").exists():
        return
    now = read_summary(run_dir)
    summary: dict[str, Any] = {
        "enqueued": now.enqueued,
        "trained": now.trained,
        "dead": now.dead,
        "dropped": now.dropped,
        "total": now.total or now.enqueued,
        "worker_kills": int(drill.kill is not None),
        "versions": now.latest_version or 0,
        "pipeline_s": round(pipeline_s, 1),
    }
    failure = now.end.cause if now.end and now.end.state == "failed" else ""
    print("stopped early, so there are no final scores; a new demo starts from the beginning", file=sys.stderr)
    with _or_note("the report"):
        cost, problems = kill_cost_of(task, run_dir, drill), task.heldout(SHOWN, SEED)
        summary |= _rollouts(task, run_dir)
        _write_report(run_dir, Report(task, summary, drill, problems, cost, stopped=True, failure=failure))


def kill_cost_of(task: DemoTask, run_dir: Path, drill: Drill) -> KillCost | None:
    """None if nobody was killed, and if the history doesn't tell."""
    if drill.kill is None or task.calls_leave_no_log:
        return None
    with _or_note("the cost of the kill"):
        return kill_cost(run_dir / "history", drill.kill)
    return None


def cost_keys(cost: KillCost | None) -> dict[str, Any]:
    """Of the summary; none if the cost isn't known."""
    if cost is None:
        return {}
    return {
        "kill_jobs": len(cost.jobs),
        "kill_wait_s": round(cost.wait_s, 3),
        "kill_decoded_again": cost.decoded_again,
        "kill_decoded_twice": cost.decoded_twice,
        "kill_restored": cost.restored,
    }


def _newest_version(run_dir: Path) -> Path:
    return sorted((run_dir / "weights").glob("v??????"))[-1]


def _prune(runs: Path, task: DemoTask) -> None:
    """Make room for one more; what isn't a demo's, or is running, stays."""
    for mark in sorted(runs.glob(f"{task.name}-*/{_MARK}"))[: -(_KEEP_RUNS - 1)]:
        with contextlib.suppress(ConfigError):
            refuse_second(mark.parent)
            shutil.rmtree(mark.parent, ignore_errors=True)


def _print(task: DemoTask, summary: dict[str, Any], cost: KillCost | None, *, usual: bool) -> None:
    before, after = (summary[f"{task.metric}_{name}"] for name in ("warm", "final"))
    updates = summary.get("mid_sequence_updates")
    last = summary.get("rollouts_last")
    rollouts = "" if last is None else f"  not the {last:.2f} of the last steps' {task.rollouts.meaning}\n"
    own = summary.get(f"{task.metric}_evaluated")
    if own is not None:
        rollouts += f"  nor the {own:.2f} of `sluice status`: held-out problems, measured as the rollouts are\n"
    landed = "" if updates is None else f"; {updates} of them landed in the middle of sequences"
    is_part = task.num_followed < task.num_heldout
    followed = f"; the curve beside the run is of the first {task.num_followed} of them" * is_part
    seen = f"  final scores seen with these settings: {task.seen}\n" if usual and task.seen else ""
    print(
        f"{task.metric_title} {before:.2f} → {after:.2f} over {summary['versions']} weight versions{landed}\n"
        f"  {task.num_heldout} held-out problems, decoded greedily: {task.metric_meaning}{followed}\n"
        f"{rollouts}{seen}"
        f"{summary['enqueued']} sequences enqueued = {summary['trained']} trained + {summary['dead']} dead "
        f"+ {summary['dropped']} dropped; {summary['lost']} lost, {summary['duplicated']} trained twice "
        f"({summary['worker_kills']} worker killed on the way)\n"
        f"{_cost_line(cost)}"
        f"pipeline {summary['pipeline_s']:.0f} s, in all {summary['wall_s']:.0f} s",
        file=sys.stderr,
    )


def _cost_line(cost: KillCost | None) -> str:
    if cost is None:
        return ""
    if not cost.jobs:
        return f"  when {cost.kill.worker} was killed, {cost.kill.why_free}\n"
    return (
        f"  {cost.kill.worker} was killed with {len(cost.jobs)} jobs: next attempts {cost.wait_s:.1f} s later, "
        f"{cost.decoded_again:,} tokens decoded again, about {cost.decoded_twice:,} of them twice\n"
    )
