"""This run's resolved configuration; the runs beside it, and their curves over each other. No run needs to be alive.

    <run_dir>/*, and what `sluice dashboard RUN_DIR …` names ──▶ Runs ─▶ table; chosen ones ─▶ overlaid curves

- A run is a directory with metrics.jsonl or config.resolved.yaml; a named directory is a run, or holds some.
- Only runs of the table can be asked for: an address holds names, never paths.
- The configuration is a searchable table, without secrets.
- The runs of a fleet (`worker.runs`) have a page too: what each does, what it got of the workers, what blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from fastapi import APIRouter, HTTPException, Request, Response

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.overview import charts_json, points
from sluice.consumers.dashboard.render import clean, query, render
from sluice.consumers.history.curves import Change, Chart, RunCurves, Step, overlaid
from sluice.consumers.history.index import NAME as INDEX
from sluice.consumers.history.index import HistoryIndex
from sluice.consumers.run_files import EVALS, HISTORY, METRICS, WEIGHTS, stored_config
from sluice.pipeline.config import Config, resolved_yaml
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.config.run_origin import placed
from sluice.pipeline.errors import ConfigError, DataError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status import fleet
from sluice.pipeline.status.descriptions import condition, stall_text
from sluice.pipeline.status.run_end import END, RunEnd, read_end
from sluice.pipeline.weights.versions import newest_number

router = APIRouter()
_MOST_RUNS, _MOST_COMPARED, _MOST_KEPT = 100, 8, 16
_Stamp = tuple[tuple[int, int], ...]
_MOST = 100  # characters in a search


_ENDED = {"complete": "good", "stopped": "", "interrupted": "warn", "killed": "warn", "failed": "bad"}


class RunLine(NamedTuple):
    """One row of the table; `at` is when its last step was written, `started` its first."""

    name: str
    directory: str
    is_this: bool
    step: int | None
    version: int | None
    started: float | None
    at: float | None
    change: Change | None
    end: RunEnd | None  # how it ended, unless it has trained since


class Runs:
    """The runs that this dashboard knows of. Blocking; thread-safe."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor, self._lock = monitor, threading.Lock()
        self._curves: OrderedDict[Path, RunCurves] = OrderedDict()  # least recently compared first
        self._lines: dict[Path, tuple[_Stamp, RunLine]] = {}

    def found(self) -> dict[str, Path]:
        """Directories by name, this run first, then the newest first; a name that comes twice has its parent's."""
        this = self._monitor.directory
        given = [this.parent, *self._monitor.others]
        some = {path.resolve(): path for place in given for path in runs_in(place)}
        some.pop(this.resolve(), None)
        newest = sorted(some, key=_written, reverse=True)[: _MOST_RUNS - 1]
        named = {self._monitor.config.run: this}
        for path in newest:
            own, parent = _name(path), _name(path.parent)
            named.setdefault(own if own not in named else f"{parent}/{own}", path)
        return named

    def curves(self, directory: Path) -> RunCurves:
        """Some are kept, so that only what was added is read again: each holds every step of its run."""
        if directory == self._monitor.directory:
            return self._monitor.curves
        with self._lock:
            found = self._curves.get(directory) or RunCurves(directory, _index_of(directory))
            self._curves[directory] = found
            self._curves.move_to_end(directory)
            while len(self._curves) > _MOST_KEPT:
                self._curves.popitem(last=False)[1].close()
            return found

    def lines(self) -> list[RunLine]:
        """The table. A run is read again once its files have changed."""
        kept, lines = self._lines, dict[Path, tuple[_Stamp, RunLine]]()
        for name, directory in self.found().items():
            end = self._end(directory)
            stamp = _stamp(directory, end)
            held = kept.get(directory)
            line = held[1]._replace(name=name) if held and held[0] == stamp else self._line(name, directory, end)
            lines[directory] = stamp, line
        self._lines = lines  # whole: pages ask from several threads
        return [line for _, line in lines.values()]

    def _end(self, directory: Path) -> RunEnd | None:
        """By its files. Of this run the broker is asked too, since it knows whether roles are alive."""
        monitor = self._monitor
        if directory == monitor.directory and monitor.seen_at is not None and monitor.problem is None:
            return monitor.newest.end
        return read_end(directory)

    def _line(self, name: str, directory: Path, end: RunEnd | None) -> RunLine:
        is_this = directory == self._monitor.directory
        curves = self._monitor.curves if is_this else RunCurves(directory)
        curves.charts()
        first, last = curves.ends
        return RunLine(
            name=name,
            directory=str(directory),
            is_this=is_this,
            step=last.step if last else None,
            version=newest_version(directory, last),
            started=first.at if first else None,
            at=last.at if last else None,
            change=curves.change(),
            end=end if end is not None and (last is None or end.at >= last.at) else None,
        )

    def _charts(self, directory: Path) -> list[Chart]:
        try:
            return self.curves(directory).charts()
        except DataError as error:  # of another release, or being made
            get_logger().debug("curves without the history's index", directory=str(directory), why=str(error))
            return RunCurves(directory).charts()

    def compared(self, names: Iterable[str]) -> list[Chart]:
        """Their charts over each other; of one run, its own."""
        known = self.found()
        chosen = [(name, self._charts(known[name])) for name in names if name in known]
        return chosen[0][1] if len(chosen) == 1 else overlaid(chosen)


def _index_of(directory: Path) -> HistoryIndex | None:
    """What a dashboard of that run has indexed; this one writes nothing there."""
    history = directory / HISTORY
    return HistoryIndex(history, may_write=False) if (history / INDEX).is_file() else None


def newest_version(directory: Path, last: Step | None) -> int | None:
    """The newest that was published; without the weights, the one that the last step started from."""
    number = newest_number(directory / WEIGHTS)
    return number if number >= 0 else last.version if last else None


def runs_in(place: Path) -> list[Path]:
    """The directory itself if it is a run, else those in it that are."""
    try:
        return [place] if is_run(place) else [path for path in place.iterdir() if is_run(path)]
    except OSError:
        return []


def chosen_run(given: Config, paths: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[Config, Path]:
    """Configuration and directory of the run to show, of those named on the command line.

    It is the first one, or the newest of a directory of runs. The configuration has the name that the run has in its
    broker, whatever its directory is called by now. Raises ConfigError and BrokerError.
    """
    for path in paths:
        if not runs_in(path):
            named = Path(given.run_dir) / path
            near = f"did you mean {named}?" if runs_in(named) else f"runs are below run_dir ({given.run_dir})"
            what = f"holds none: a run's directory has {METRICS} or {RESOLVED}" if path.is_dir() else "no directory"
            file = f"; a configuration is given as -c {path}" * path.is_file()
            raise ConfigError(f"{path} is no run and {what}; {near}{file}")
    directory = max(runs_in(paths[0]), key=_written).resolve()
    found = stored_config(directory, given, overrides)
    url = found.broker.url or given.broker.url  # one with a password isn't stored; the environment has it
    found = msgspec.structs.replace(
        found,
        broker=msgspec.structs.replace(found.broker, url=url),
        dashboard=msgspec.structs.replace(found.dashboard, port=given.dashboard.port),  # its own one's was for its time
    )
    config = placed(found, directory)
    stored = (directory / RESOLVED).is_file()
    return (msgspec.structs.replace(config, run=found.run) if stored else config), directory


def is_run(directory: Path) -> bool:
    return _written(directory) > 0.0


def _written(directory: Path) -> float:
    """Unix time of the newest of the files that make it a run; 0 if it has none that can be reached."""
    times = [0.0]
    for name in (METRICS, RESOLVED):
        with contextlib.suppress(OSError):
            status = (directory / name).stat()
            times.append(max(status.st_mtime, 1.0) if stat.S_ISREG(status.st_mode) else 0.0)
    return max(times)


def _stamp(directory: Path, end: RunEnd | None) -> _Stamp:
    """Changes with what the table shows of a run."""
    found: list[tuple[int, int]] = []
    for name in (METRICS, EVALS, END):
        with contextlib.suppress(OSError):
            status = (directory / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
    return (*found, (int(end.at * 1e6) if end else 0, 0))  # a supervisor that is killed writes no file


def _name(path: Path) -> str:
    """Its name, without bytes that no page can carry."""
    return os.fsencode(path.name).decode(errors="replace")


def _chosen(request: Request, this: str) -> list[str]:
    names = [clean(name) for name in request.query_params.getlist("with")]
    return list(dict.fromkeys(names))[:_MOST_COMPARED] or [this]


@router.get("/runs")
async def runs(request: Request) -> Response:
    """The table, and the curves of the chosen ones."""
    monitor, known = monitor_of(request), _runs_of(request)
    chosen = _chosen(request, monitor.config.run)
    lines = await asyncio.to_thread(known.lines)
    charts = await asyncio.to_thread(known.compared, chosen)
    drawn = [(chart, points(chart.lines[0].values)) for chart in charts]
    shown = [line.name for line in lines if line.name in chosen]
    address = "/runs/curves?" + "&".join(query({"with": name}) for name in shown)
    parts: dict[str, Any] = {"lines": lines, "chosen": chosen, "charts": drawn, "from": address, "shown": shown}
    return render(request, "runs.html.j2", **parts, most=_MOST_COMPARED, ended=_ENDED)


@router.get("/runs/curves")
async def compared(request: Request) -> Response:
    """The charts as JSON."""
    chosen: Sequence[str] = _chosen(request, monitor_of(request).config.run)
    return charts_json(await asyncio.to_thread(_runs_of(request).compared, chosen))


def _runs_of(request: Request) -> Runs:
    state = request.app.state
    if not hasattr(state, "runs"):
        state.runs = Runs(monitor_of(request))
    return state.runs


class Setting(NamedTuple):
    key: str
    value: str
    default: str
    is_default: bool


@router.get("/config")
async def config(request: Request, search: str = "", changed: str = "") -> Response:
    """Keys and values that contain `search`; with `changed`, only non-default ones."""
    text = search.strip()[:_MOST]
    resolved = await asyncio.to_thread(monitor_of(request).run_config.read)
    every = settings(resolved.config)
    found = [one for one in every if _fits(one, text.lower()) and not (changed and one.is_default)]
    parts = {"found": found, "total": len(every), "origin": resolved.origin}
    return render(request, "config.html.j2", **parts, search=text, changed=bool(changed))


def settings(config: Config) -> list[Setting]:
    """Every configuration key, in file order."""
    defaults = dict(_flat(msgspec.to_builtins(Config())))
    tree = yaml.safe_load(resolved_yaml(config))
    return [
        Setting(key, _shown(value), _shown(defaults.get(key)), key in defaults and defaults[key] == value)
        for key, value in _flat(tree)
    ]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, list(tree) if isinstance(tree, tuple) else tree


def _shown(value: Any) -> str:
    """As in YAML, with passwords in addresses hidden."""
    if isinstance(value, str):
        return (hide_password(value) if "://" in value else value) or '""'
    return msgspec.json.encode(value).decode()


def _fits(one: Setting, text: str) -> bool:
    return text in one.key.lower() or text in one.value.lower()


_LOOKED_S = 1.5  # how often the runs are looked at, however many browsers ask


class FleetLooks:
    """The newest look at all runs, and tokens/s since the one before."""

    def __init__(self, config: Config) -> None:
        self._config, self._lock = config, asyncio.Lock()
        self._looks: list[fleet.RunLook] = []
        self._at = float("-inf")
        self._tokens: dict[str, tuple[float, int]] = {}  # run -> Unix s of its broker, tokens
        self._rates: dict[str, float] = {}

    async def newest(self) -> tuple[list[fleet.RunLook], dict[str, float]]:
        """Every run, and tokens/s by run."""
        async with self._lock:
            if time.monotonic() - self._at > _LOOKED_S:
                self._looks = await fleet.look(self._config)
                self._at = time.monotonic()
                for each in self._looks:
                    self._count(each)
            return self._looks, self._rates

    def _count(self, each: fleet.RunLook) -> None:
        if (now := each.now) is None:
            self._rates.pop(each.name, None)
            return
        at, tokens = self._tokens.get(each.name, (now.at, now.tokens))
        if now.at > at:
            self._rates[each.name] = max(0.0, (now.tokens - tokens) / (now.at - at))
        self._tokens[each.name] = now.at, now.tokens


@router.get("/fleet")
async def fleet_page(request: Request) -> Response:
    """The table of a fleet."""
    return render(request, "fleet.html.j2", **await _fleet_parts(request))


@router.get("/fleet/live")
async def fleet_live(request: Request) -> Response:
    """The table of a fleet alone, for the page that is open."""
    return render(request, "fleet_live.html.j2", **await _fleet_parts(request))


async def _fleet_parts(request: Request) -> dict[str, Any]:
    looks: FleetLooks | None = getattr(request.app.state, "fleet", None)
    if looks is None:
        raise HTTPException(404, "This dashboard shows one run; `sluice dashboard -c FLEET.yaml` shows a fleet.")
    found, rates = await looks.newest()
    total = sum(rates.values())
    return {
        "lines": [
            {
                "look": each,
                "now": each.now,
                "condition": each.now and condition(each.now),
                "rate": rates.get(each.name),
                "share": rates[each.name] / total if total and each.name in rates else None,
                "workers": each.now and fleet.workers(each.now),
                "stalls": [stall_text(each.now, one).says for one in each.now.stalls if one.blocks] if each.now else [],
            }
            for each in found
        ]
    }
