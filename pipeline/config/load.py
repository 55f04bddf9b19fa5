"""Read a configuration: `--set` > the listed environment variables > YAML > defaults.

- An unknown key is an error that names the file, the path and the nearest valid key; all errors are reported at once.
- Override values are parsed as YAML, so `--set trainer.learning_rate=1e-3` is a number; so are those of the environment
  that are no text.
- The YAML is safe, and two habits of YAML 1.1 are off: `1e-4` is a number, and a duplicate key is an error. Aliases
  can't multiply: a document stands for at most `_MOST_VALUES` values.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from sluice.pipeline.config import rules, suggest
from sluice.pipeline.config.redaction import NO_USER, hide_password, is_secret, shown, shown_override
from sluice.pipeline.config.types import CONVENTIONS, Config
from sluice.pipeline.errors import ConfigError, as_one
from sluice.pipeline.wire.codec import MAX_DEPTH, no_plain_value

ENVIRONMENT = {
    "REDIS_URL": "broker.url",
    "SLUICE_RUN_DIR": "run_dir",
    "SLUICE_MODEL": "model.path",
    "SLUICE_DATA": "data.path",
    "SLUICE_ROLLOUT_URL": "rollout.url",
    "SLUICE_GATEWAY_URL": "rollout.gateway_url",
    "SLUICE_METRICS_HOST": "metrics.host",
    "SLUICE_METRICS_PORT": "metrics.port",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "tracing.endpoint",
    "ROLLOUT_SERVER_PORT": "rollout_server.port",
    "MAX_CONCURRENT_ROLLOUTS": "rollout_server.max_concurrent_rollouts",
    "TOKENIZER_CACHE_SIZE": "rollout_server.tokenizer_cache_size",
    "TOKENIZER_TRUST_REMOTE_CODE": "rollout_server.tokenizer_trust_remote_code",
    "HTTP_CLIENT_TIMEOUT": "rollout_server.http_client_timeout_s",
}
_ROLLOUT_URLS = ("url", "gateway_url", "tool_server_url")
_SECTIONS = list(Config.__struct_fields__)
_PARSED = ("rollout_server.", "metrics.port")  # the values of these keys are YAML, the others text


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The resolved configuration; raises ConfigError with file, path and remedy of everything that is wrong."""
    found = read_config(path, overrides, environ)
    if found.problems:
        raise ConfigError(as_one(found.problems) + (f"\n{UNASKED}" if found.unasked else ""))
    return found.config


def is_run(directory: Path) -> bool:
    """Whether a run was started there."""
    return (directory / RESOLVED).is_file()


@dataclass(frozen=True)
class Found:
    """A configuration and all that is wrong with it."""

    config: Config
    problems: list[str]
    unsure: frozenset[str]
    """Sections, or keys of the top level, whose values aren't what was meant, or break a rule by themselves."""
    unasked: bool = False
    """Whether rules couldn't be checked because of the problems."""


UNASKED = "rules that read these keys too are checked once this is fixed"


def read_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Found:
    """For a command that has more to say than the first error; raises ConfigError if the file can't be read at all."""
    tree, problems, unsure = _read(Path(path)) if path else {}, list[str](), _Unsure()
    origin = str(path) if path else "defaults"
    environ = os.environ if environ is None else environ
    for name, dotted in ENVIRONMENT.items():
        if text := environ.get(name):
            with _collected(problems, unsure, dotted):
                _put_variable(tree, name, dotted, text)
    for item in overrides:
        with _collected(problems, unsure, item.partition("=")[0].strip()):
            _override(tree, item)
    with _collected(problems, unsure, "rollout_matching"):
        _adopt_custom_subtree(tree, origin)
    judged = _Unsure()
    with _collected(problems, judged, "policy", "rollout_matching"):
        _adopt_reward(tree, origin)
    _adopt_loss(tree)
    for problem, dotted, mapping, key in list(suggest.unknown_keys(Config, tree)):
        problems.append(f"{origin}: {problem}")
        unsure.add(dotted)
        mapping.pop(key, None)  # an alias stands in several places
    config = _converted(tree, origin, problems, unsure)
    judged.take(unsure)
    alone = rules.sure_complaints(config, judged.sections)
    between, unasked = rules.between_sure_keys(config, judged.keys)
    unasked = unasked or bool(judged.sections & rules.at_fault(config))
    at_fault = set[str]().union(*alone.values()) if problems else rules.at_fault(config)
    problems += [f"{_variable_at_fault(config, complaint, environ) or origin}: {complaint}" for complaint in alone]
    problems += [f"{origin}: {complaint}" for complaint in between]
    return Found(config, problems, frozenset(unsure.sections | at_fault), unasked)


class _Unsure:
    """What isn't as it was meant: sections and, where only one of its keys is concerned, section.key."""

    def __init__(self) -> None:
        self.sections, self.keys = set[str](), set[str]()

    def add(self, dotted: str) -> None:
        """A key, and the one that was probably meant if there is none of that name; where that is unknown, all."""
        section, _, rest = dotted.partition(".")
        meant = section if section in _SECTIONS else suggest.nearest(section, _SECTIONS) or section
        self.sections |= {section, meant}
        keys = getattr(getattr(Config(), meant, None), "__struct_fields__", ())
        key = rest.partition(".")[0].partition("[")[0]
        if meant != section or not rest or not keys:
            self.keys.add(meant)
        elif key in keys:
            self.keys.add(f"{section}.{key}")
        else:
            near = suggest.nearest(key, list(keys))
            self.keys.add(f"{section}.{near}" if near else section)

    def take(self, other: _Unsure) -> None:
        """All of another one's."""
        self.sections |= other.sections
        self.keys |= other.keys


@contextlib.contextmanager
def _collected(problems: list[str], unsure: _Unsure, *dotted: str) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))
        for key in dotted:
            unsure.add(key)


def _put_variable(tree: dict[str, Any], name: str, dotted: str, text: str) -> None:
    where = f"environment variable {name}"
    _put(tree, dotted, _value_alone(dotted, text, where) if dotted.startswith(_PARSED) else text, where)


def _variable_at_fault(config: Config, complaint: str, environ: Mapping[str, str]) -> str | None:
    """The environment variable without whose value this rule of a key's own would hold."""
    for name, dotted in ENVIRONMENT.items():
        if str(attrgetter(dotted)(config)) == environ.get(name):
            section, _, key = dotted.partition(".")
            usual = getattr(Config(), section)
            if key:
                usual = msgspec.structs.replace(getattr(config, section), **{key: getattr(usual, key)})
            if complaint not in rules.complaints(msgspec.structs.replace(config, **{section: usual})):
                return f"environment variable {name}"
    return None


def _override(tree: dict[str, Any], item: str) -> None:
    dotted, sep, text = item.partition("=")
    origin = shown_override(item)
    if not sep:
        raise ConfigError(f"{origin}: write it as --set path.to.key=value")
    _put(tree, dotted.strip(), parse_yaml(text, origin), origin)


def override(key: str, value: object) -> str:
    """`key=value` for `load_config`, of a value that is no YAML, such as a path: it's taken as it is."""
    # Not escaped: YAML reads the two escapes that JSON has for a character as two characters.
    return f"{key}={json.dumps(value, default=str, ensure_ascii=False)}"


def resolved_yaml(config: Config, *, secrets: bool = False) -> str:
    """The whole configuration as YAML, defaults filled in; a broker URL with a password is left out.

    Of the URLs of rollouts, user and password are left out, and secrets of the query become ***.
    """
    tree = msgspec.to_builtins(config)
    if not secrets:
        if hide_password(config.broker.url) != config.broker.url:
            tree["broker"]["url"] = None
        for name in _ROLLOUT_URLS:
            tree["rollout"][name] = (hide_password(tree["rollout"][name]) or "").replace(NO_USER, "", 1) or None
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=110)


def _converted(tree: dict[str, Any], origin: str, problems: list[str], unsure: _Unsure) -> Config:
    """Adds each value of the wrong type to the problems; such a key is left out."""
    while True:
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as error:  # it names the first
            if (found := _without(tree, str(error))) is not None:
                dotted, value = found
                problems.append(f"{origin}: {_wrong(dotted, value, str(error))}")
                unsure.add(dotted)
            else:
                problems.append(f"{origin}: {_readable(str(error))}")
                for section in _SECTIONS:
                    unsure.add(section)
                return Config()


def _wrong(dotted: str, value: Any, message: str) -> str:
    """What msgspec complains of in one value, and the words that may stand there, if they are few."""
    words = suggest.choices(Config, dotted)
    if not words or not isinstance(value, str):
        return _readable(message) + _shown(dotted, value)
    near = suggest.nearest(value, words)
    return f"{dotted} must be one of {', '.join(words)}, got {shown(value)}" + (
        f"; did you mean {near!r}?" if near else ""
    )


def _shown(dotted: str, value: Any) -> str:
    """A short value behind what is wrong with it; no secret."""
    text = repr(value)
    is_plain = isinstance(value, str | int | float) and len(text) <= _SHOWN_CHARS
    return f" ({text})" if is_plain and "://" not in text and not is_secret(dotted) else ""


def _without(tree: dict[str, Any], message: str) -> tuple[str, Any] | None:
    """Remove the key that msgspec complains of; its dotted path and its value, or None if it names none."""
    place = re.search(r" - at `\$([^`\[]*)", message)
    *above, key = place[1].split(".") if place else [""]
    node: Any = tree
    for part in above[1:]:
        node = cast("dict[str, Any]", node).get(part) if isinstance(node, dict) else None
    if not (key and isinstance(node, dict) and key in node):
        return None
    return ".".join([*above[1:], key]), cast("dict[str, Any]", node).pop(key)


def _value_alone(dotted: str, text: str, where: str) -> Any:
    """A number or flag of the environment; what is wrong with it names the variable."""
    tree: dict[str, Any] = {}
    _put(tree, dotted, parse_yaml(text, where), where)
    problems: list[str] = []
    config = _converted(tree, where, problems, _Unsure())
    if problems:
        raise ConfigError(as_one(problems))
    rules.check(config, where)
    return parse_yaml(text, where)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        path = path / RESOLVED if (path / RESOLVED).is_file() else _shipped(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        names = [file.stem for file in _CONFIGS.glob("*.yaml")]
        near = suggest.nearest(path.stem, names)
        meant = f"did you mean {near!r}?" if near else f"installed ones: {', '.join(sorted(names))}"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing YAML file; {meant}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections, got {type(tree).__name__}")
    return cast("dict[str, Any]", tree)


def _shipped(path: Path) -> Path:
    """`-c text` and `-c configs/text.yaml` work wherever sluice is installed; else the path as it is."""
    name = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    is_name = path.parent == Path("configs") or len(path.parts) == 1
    return _CONFIGS / name if is_name and (_CONFIGS / name).is_file() else path


def _put(tree: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    parts = dotted.split(".")
    suggest.refuse_unknown_path(Config, parts, origin)
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {part!r} is {shown(child)} in the file, not a mapping")
        node = cast("dict[str, Any]", child)
    node[parts[-1]] = value


def _adopt_custom_subtree(tree: dict[str, Any], origin: str) -> None:
    """`custom.extra.rollout_matching` is an accepted place for `rollout_matching`; both at once are an error."""
    custom = tree.get("custom")
    found = cast("dict[str, Any]", custom).get("extra") if isinstance(custom, dict) else None
    if not isinstance(found, dict) or "rollout_matching" not in found:
        return
    extra = cast("dict[str, Any]", found)
    if tree.get("rollout_matching") is not None:
        raise ConfigError(
            f"{origin}: rollout_matching and custom.extra.rollout_matching are both given; keep one of them"
        )
    tree["rollout_matching"] = extra.pop("rollout_matching")


def _adopt_reward(tree: dict[str, Any], origin: str) -> None:
    """`rollout_matching.reward` turns `policy.enabled` on, and is a task of its own where none is named."""
    matching: Any = tree.get("rollout_matching")
    if not isinstance(matching, dict) or matching.get("reward") is None:  # pyright: ignore[reportUnknownMemberType]
        return
    policy: Any = tree.setdefault("policy", {})
    if not isinstance(policy, dict):  # refused with all else that is no mapping
        return
    matching, policy = cast("dict[str, Any]", matching), cast("dict[str, Any]", policy)
    matching.setdefault("task", "reward")
    if policy.get("enabled") is False:
        raise ConfigError(
            f"{origin}: policy.enabled is false, and rollout_matching.reward needs it: rewards train through the "
            "policy loss alone; remove policy.enabled, which the reward turns on, or the reward"
        )
    policy.setdefault("enabled", True)


def _adopt_loss(tree: dict[str, Any]) -> None:
    """`policy.loss` sets what belongs to its name; whatever is written out stays."""
    policy: Any = tree.get("policy")
    if not isinstance(policy, dict):
        return
    policy = cast("dict[str, Any]", policy)
    name = policy.get("loss")
    for key, value in CONVENTIONS.get(name, {}).items() if isinstance(name, str) else ():
        policy.setdefault(key, value)
    sampling: Any = tree.get("sampling")
    if policy.get("aggregation") == "constant" and isinstance(sampling, dict) and "max_new_tokens" in sampling:
        policy.setdefault("aggregation_tokens", sampling["max_new_tokens"])


def _readable(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a.b`" with the path first."""
    text, sep, where = message.partition(" - at `$.")
    return f"{where.rstrip('`')}: {text}" if sep else text


RESOLVED = "config.resolved.yaml"
"""In a run's directory: its configuration, defaults filled in."""

_CONFIGS = Path(__file__).parents[2] / "configs"
_MOST_CHARS = 1 << 20
_SHOWN_CHARS = 40
_MOST_VALUES = 100_000
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader that lists duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Each mapping comes by here, perhaps as part of another, before keys are merged into it (`<<`)."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._list_twice([key for key, _ in node.value if key.tag != _MERGE])
        super().flatten_mapping(node)

    def _list_twice(self, keys: list[yaml.Node]) -> None:
        seen: set[Any] = set()
        for node in keys:
            key = cast(Any, self).construct_object(node, deep=True)
            if key in seen:
                mark = node.start_mark
                self.twice.append(f"key {key!r} is given twice (line {mark.line + 1}); remove one of them")
            seen.add(key)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that `_Loader` would read as something else."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one document; raises ConfigError with the origin and line."""
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"{origin}: {len(text)} characters; a configuration has at most {_MOST_CHARS}")
    loader: Any = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, set(), {})
        value = loader.construct_document(node)
        twice: list[str] = loader.twice
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark, says = error.problem_mark or error.context_mark, error.problem or error.context
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        tab = "; indent with spaces" if says and "\\t" in says else ""
        raise ConfigError(f"{origin}: not valid YAML: {place}{says}{tab}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if twice:
        raise ConfigError(as_one([f"{origin}: {one}" for one in twice]))
    if problem := no_plain_value(value, ""):
        raise ConfigError(f"{origin}: {problem}")
    return value


def _measure(node: Any, above: set[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node with its aliases expanded, as a reader of the tree meets them."""
    if (found := known.get(id(node))) is not None:
        return found
    line = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigError(f"the alias in line {line} refers to a value that contains it; write the value out")
    if len(above) >= MAX_DEPTH:
        raise ConfigError(f"line {line} is nested deeper than {MAX_DEPTH} levels; flatten it")
    inner: list[Any] = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    above.add(id(node))
    sizes = [_measure(part, above, known) for part in inner]
    above.discard(id(node))
    values = 1 + sum(size for size, _ in sizes)
    levels = 1 + max((level for _, level in sizes), default=0)
    if values > _MOST_VALUES or len(above) + levels > MAX_DEPTH:
        raise ConfigError(
            f"with its aliases expanded, the value at line {line} has more than {_MOST_VALUES} values or {MAX_DEPTH} "
            "levels; use fewer of them"
        )
    known[id(node)] = values, levels
    return values, levels
