"""Rules between keys. Each says which keys, why, and what to do; `policy_warnings` lists what is allowed but unwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from ipaddress import IPv6Address
from math import inf
from operator import attrgetter
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.config.types import (
    CONVENTIONS,
    Config,
    DataConfig,
    EvalConfig,
    FsdpConfig,
    PolicyConfig,
    RepeatTerminateConfig,
    TracingConfig,
    WorkerConfig,
)
from sluice.pipeline.errors import ConfigError, as_one
from sluice.pipeline.wire.messages import MAX_GROUP, MAX_PRIORITY, RESHAPING, SamplingParams


def check(config: Config, origin: str) -> None:
    """Raise ConfigError with every rule that does not hold."""
    if found := complaints(config):
        raise ConfigError(as_one([f"{origin}: {complaint}" for complaint in found]))


def complaints(config: Config) -> list[str]:
    """Every rule that does not hold; those between keys are asked once each key's own rules hold."""
    if found := _alone(config):
        return found
    return [complaint for rules in _BETWEEN for holds, complaint in rules(config) if not holds]


def between_sure_keys(config: Config, unsure: Collection[str]) -> tuple[list[str], bool]:
    """Rules between keys that don't hold whatever is meant by the unsure keys; and whether others weren't asked.

    `unsure`: dotted keys and whole sections. Sections that break a rule by themselves count as unsure too.
    """
    wrong, usual = at_fault(config), Config()
    reads = _Reads(replace(config, **{name: getattr(usual, name) for name in wrong}))
    unsure, found, skipped = {*unsure, *wrong}, list[str](), False
    for rules in _BETWEEN:
        shared: set[str] | None = None
        for holds, complaint in rules(cast(Config, reads)):
            read = reads.taken()
            shared = read if shared is None else shared  # read before the first one, for all of them
            if not unsure.isdisjoint(read | shared):
                skipped = True
            elif not holds:
                found.append(complaint)
        if not unsure.isdisjoint(reads.taken()):  # rules that weren't asked, such as those of a feature that is off
            skipped = True
    return found, skipped


class _Reads:
    """A configuration that remembers which of its keys were read: as section.key, and as the section alone."""

    def __init__(self, config: Any, section: str = "", read: set[str] | None = None) -> None:
        self._config, self._section, self._read = config, section, set[str]() if read is None else read

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if not self._section and isinstance(value, Struct):
            return _Reads(value, name, self._read)
        fields = self._config.__struct_fields__
        keys = [name] if name in fields else fields  # a property reads any of them
        self._read.update(f"{self._section}.{key}" if self._section else key for key in keys)
        self._read.update([self._section] if self._section else [])
        return value

    def taken(self) -> set[str]:
        """What was read since the last call."""
        taken = set(self._read)
        self._read.clear()
        return taken


def sure_complaints(config: Config, unsure: Collection[str]) -> dict[str, set[str]]:
    """The keys' own rules that don't hold whatever is wrong with the unsure sections; each with those at fault."""
    found, usual = _alone(config), Config()
    if not found:
        return {}
    without = {name: _alone(replace(config, **{name: getattr(usual, name)})) for name in config.__struct_fields__}
    at_fault = {one: {name for name, others in without.items() if one not in others} for one in found}
    return {one: names for one, names in at_fault.items() if names.isdisjoint(unsure) and (names or not unsure)}


def at_fault(config: Config) -> set[str]:
    """The sections, and keys of the top level, without whose values fewer of the keys' own rules are broken."""
    count, usual = len(_alone(config)), Config()
    if not count:
        return set()
    changes = ((name, getattr(usual, name)) for name in config.__struct_fields__)
    return {name for name, value in changes if len(_alone(replace(config, **{name: value}))) < count}


def _alone(config: Config) -> list[str]:
    alone = (
        _identity, _numbers, _weights, _lora, _schedule, _evaluation, _images, _policy_numbers, _scorer_counts,
        _rewards, _rollouts, _what_a_rollout_server_takes, _history_and_servers,
    )  # fmt: skip
    found = [complaint for rules in alone for holds, complaint in rules(config) if not holds]
    return found + [
        f"rollout_matching.repeat_terminate.{one}" for one in _guard(config.rollout_matching.repeat_terminate)
    ]


def check_guard(guard: RepeatTerminateConfig, origin: str, where: str = "repeat_terminate") -> None:
    """Raise ConfigError for thresholds that no guard can have; `where` is the subtree's place in `origin`."""
    if found := [f"{origin}: {where}.{complaint}" for complaint in _guard(guard)]:
        raise ConfigError(as_one(found))


def _guard(guard: RepeatTerminateConfig) -> list[str]:
    run, size, keys = guard.max_consecutive_token_repeats, guard.ngram_size, guard.max_object_keys
    blocks = bool(size and size > 0 and guard.ngram_repeats >= 2)
    off = not (run and run > 0) and not blocks and keys is None
    checks = (
        (guard.min_new_tokens >= 0, f"min_new_tokens must be >= 0, got {guard.min_new_tokens}"),
        (keys is None or keys >= 1, f"max_object_keys must be >= 1, or null for none, got {keys}"),
        (keys is None or bool(guard.object_key_prefix), "object_key_prefix is empty, and max_object_keys counts it"),
        (
            not re.search("[\ud800-\udfff]", guard.object_key_prefix),
            "object_key_prefix has half of a surrogate pair, which no token produces; write the whole character",
        ),
        (
            blocks or not guard.any_period,
            "any_period looks at the last ngram_size * ngram_repeats tokens; set ngram_size >= 1, ngram_repeats >= 2",
        ),
        (not (guard.enabled and off), "enabled is true, but every rule is off; set one of its thresholds"),
    )
    return [complaint for holds, complaint in checks if not holds]


def _identity(config: Config) -> list[tuple[bool, str]]:
    return [
        (
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.run)),
            f"run {config.run!r}: use 1-64 letters, digits, '.', '_' or '-'",
        ),
    ]


_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "> 0": (
        lambda value: value > 0,
        (
            "broker.socket_timeout_s", "broker.connect_timeout_s",
            "model.preprocess.max_pixels", "model.preprocess.min_pixels",
            "data.epochs",
            "producer.group_size", "producer.samples_per_version", "producer.max_in_flight_mb", "producer.poll_s",
            "worker.max_batch", "worker.max_attempts", "worker.lease_s", "worker.renew_s", "worker.stall_timeout_s",
            "worker.poll_s", "worker.vllm.kv_cache_gb", "worker.vllm.max_model_len", "worker.vllm.tensor_parallel_size",
            "consumer.count", "consumer.row_tokens", "consumer.max_sample_tokens", "consumer.poll_s",
            "rollout_matching.match_top_k", "rollout_matching.max_objects", "rollout_matching.max_text_chars",
            "trainer.publish_every", "trainer.checkpoint_every", "trainer.learning_rate", "trainer.max_grad_norm",
            "trainer.micro_batch_tokens", "trainer.minibatches", "trainer.ranks", "trainer.tensor_parallel",
            "trainer.rank_timeout_s", "trainer.checkpoint_timeout_s", "trainer.keep_checkpoints",
            "trainer.batch_wait_s", "trainer.lora.alpha",
            "weights.load_timeout_s", "weights.store_timeout_s", "weights.anchor_every", "weights.cache_gb",
            "weights.publish_timeout_s", "weights.probe_tokens", "weights.max_pause_s", "weights.tries",
            "up.stop_grace_s",
        ),
    ),
    ">= 0": (
        lambda value: value >= 0,
        (
            "broker.retry_for_s",
            "data.limit",
            "worker.count", "worker.checkpoint_tokens", "worker.keep_result_s", "worker.drain_s",
            "worker.prefix_cache_mb", "worker.prefix_wait_s", "worker.torch_threads",
            "rollout_matching.desc_ce_weight", "rollout_matching.fp_cost", "rollout_matching.fn_cost",
            "trainer.warmup_steps", "trainer.weight_decay", "trainer.smooth_l1_weight", "trainer.ciou_weight",
            "trainer.max_versions", "trainer.torch_threads", "trainer.lora.rank",
            "scorer.torch_threads",
            "weights.probe_tolerance", "weights.second_copy_gb",
            "up.restart_backoff_s", "up.restart_backoff_max_s", "up.max_restarts", "up.restart_window_s",
        ),
    ),
    "in 0..1": (lambda value: 0 <= value <= 1, ("rollout_matching.gt_only_fraction", "rollout_matching.iou_gate")),
    "in 0..1, 0 excluded": (lambda value: 0 < value <= 1, ("worker.vllm.gpu_memory_utilization",)),
    "in 0..1, 1 excluded": (lambda value: 0 <= value < 1, ("trainer.betas", "trainer.lora.dropout")),
}  # fmt: skip
_LONGEST_S = 1_000_000  # poll counts milliseconds in 31 bits
_UNBOUNDED = ("broker.retry_for_s", "trainer.max_grad_norm")  # infinity is their word for no limit


def _numbers(config: Config) -> Iterator[tuple[bool, str]]:
    """The range of each number that needs no other key to be judged; null is what its comment says."""
    for words, (holds, keys) in _RANGES.items():
        for key in keys:
            found: Any = attrgetter(key)(config)
            values = cast("tuple[float, ...]", found) if isinstance(found, tuple) else () if found is None else (found,)
            for value in values:
                yield holds(value), f"{key} must be {words}, got {value}"
                yield value != inf or key in _UNBOUNDED, f"{key} must be a finite number, got {value}"
    size = config.producer.group_size
    yield size <= MAX_GROUP, f"producer.group_size must be at most {MAX_GROUP}, got {size}"
    needed = "sampling.logprobs must be true: training needs them; a gateway's call outside a rollout goes without"
    yield config.sampling.logprobs, needed


def _parts(url: str) -> SplitResult:
    """All empty, which no rule accepts, for a URL that can't be parsed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _weights(config: Config) -> list[tuple[bool, str]]:
    weights = config.weights
    url, key = weights.store_url, "weights.store_url"
    patience = (
        weights.transport not in ("store", "delta") or weights.store_timeout_s < weights.load_timeout_s,
        f"weights.store_timeout_s {weights.store_timeout_s:g} must be below weights.load_timeout_s "
        f"{weights.load_timeout_s:g}: a worker would end before it says that the store is away",
    )
    if url is None:
        needs = "weights.transport store without weights.store_url: set it to a URL such as s3://bucket/folder"
        return [patience, (weights.transport != "store", needs)]
    parts = _parts(url)
    shown = parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1], query="", fragment="").geturl() or hide_password(url)
    return [
        patience,
        (
            weights.transport != "directory",
            f"{key} {shown} with weights.transport {weights.transport} has no effect: set the transport to store, "
            "delta or engine, or remove the URL",
        ),
        (
            re.fullmatch(r"(s3|s3a|gs|gcs|file|memory)", parts.scheme) is not None and "::" not in url,
            f"{key} {shown!r}: must begin with s3://, gs:// or file://",
        ),
        (
            "@" not in parts.netloc and not parts.query and not parts.fragment,
            f"{key} {shown!r} has a credential or an option in it, and logs and pages show it: give them by the "
            "environment (AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and the like)",
        ),
    ]


def _lora(config: Config) -> list[tuple[bool, str]]:
    lora = config.trainer.lora
    return [
        (
            lora.target_modules == "all-linear" or bool(lora.target_modules),
            "trainer.lora.target_modules is empty: name modules, such as [q_proj, v_proj], or set it to all-linear",
        ),
    ]


_MOST_RUNS = 256  # of one engine: each has connections, a thread and an adapter


def _fleet(worker: WorkerConfig) -> Iterator[tuple[bool, str]]:
    yield (
        not worker.runs or worker.lora == "requests",
        "worker.runs needs worker.lora requests: each run's adapter is kept beside the base; set it",
    )
    yield len(worker.runs) <= _MOST_RUNS, f"worker.runs has {len(worker.runs)} entries; at most {_MOST_RUNS}"
    for at, run in enumerate(worker.runs):
        key = f"worker.runs[{at}]"
        yield bool(run.config), f"{key}.config names no file; give the run's YAML file, or its directory"
        yield 0 < run.weight < inf, f"{key}.weight must be a finite number > 0, got {run.weight}"
        yield run.quota is None or run.quota >= 1, f"{key}.quota must be >= 1, or null for none, got {run.quota}"


_ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


def _adapters(config: Config) -> Iterator[tuple[bool, str]]:
    worker, trainer = config.worker, config.trainer
    beside = worker.lora == "requests"
    for name, directory in worker.adapters.items():
        key = f"worker.adapters.{name}"
        yield (
            bool(re.fullmatch(_ADAPTER_NAME, name)),
            f"{key}: use 1-64 letters, digits, '_', '.' or '-', beginning with a letter or digit",
        )
        yield (
            name not in ("default", config.gateway.model_name),
            f"{key}: this name means the policy (gateway.model_name); name the adapter differently",
        )
        yield bool(directory), f"{key} names no directory; give that of its adapter_config.json"
    yield (
        beside or not worker.adapters,
        "worker.adapters needs worker.lora requests: adapters are kept beside the base; set it",
    )
    yield from _fleet(worker)
    yield (
        not beside or bool(worker.adapters) or trainer.lora.enabled or bool(worker.runs),
        "worker.lora requests without trainer.lora.rank or worker.adapters: there is no adapter; set one, or merged",
    )
    yield (
        not beside or trainer.lora.enabled or trainer.external or bool(worker.runs),
        "worker.lora requests with a trainer of all weights: its versions would replace the base that the adapters "
        "belong to; set trainer.lora.rank, or trainer.external: true where nothing is trained",
    )
    yield (
        not beside or not config.deterministic,
        "worker.lora requests in a deterministic run wasn't tried; set it to merged",
    )


def _schedule(config: Config) -> list[tuple[bool, str]]:
    trainer = config.trainer
    steps, versions, key = trainer.schedule_steps, trainer.max_versions, f"trainer.schedule {trainer.schedule}"
    last = versions * trainer.publish_every if steps is None and versions is not None else steps
    moves = trainer.schedule != "constant"
    return [
        (
            0 <= trainer.min_learning_rate <= trainer.learning_rate,
            f"trainer.min_learning_rate {trainer.min_learning_rate} must be in 0..trainer.learning_rate "
            f"({trainer.learning_rate})",
        ),
        (
            not moves or last is not None,
            f"{key} needs to know when it ends: set trainer.schedule_steps (optimiser steps) or trainer.max_versions",
        ),
        (
            not moves or last is None or last > trainer.warmup_steps,
            f"{key} ends at step {last}, within the {trainer.warmup_steps} steps of trainer.warmup_steps; raise "
            "trainer.schedule_steps",
        ),
        (
            moves or (steps is None and trainer.min_learning_rate == 0),
            "trainer.schedule_steps and trainer.min_learning_rate do nothing with trainer.schedule constant; set it to "
            "cosine or linear",
        ),
    ]


def _evaluation(config: Config) -> list[tuple[bool, str]]:
    one = config.eval
    positive = {"every": one.every, "n": one.n, "max_in_flight": one.max_in_flight, "wait_s": one.wait_s}
    found = [
        (0 < value < inf, f"eval.{key} must be a finite number > 0, got {value}") for key, value in positive.items()
    ]
    at_least = {"limit": (one.limit, 0), "patience": (one.patience, 1), "keep_answers": (one.keep_answers, 0)}
    found += [
        (value is None or value >= least, f"eval.{key} must be >= {least}, got {value}")
        for key, (value, least) in at_least.items()
    ]
    found += [
        (one.n <= MAX_GROUP, f"eval.n must be at most {MAX_GROUP}, got {one.n}"),
        (bool(one.k), "eval.k is empty; name at least one k, such as [1]"),
        (
            all(1 <= k <= one.n for k in one.k),
            f"eval.k {list(one.k)}: pass@k needs 1 <= k <= eval.n ({one.n}); raise eval.n or leave the larger ones out",
        ),
        (len(set(one.k)) == len(one.k), f"eval.k {list(one.k)} names one twice"),
        (0 <= one.priority <= MAX_PRIORITY, f"eval.priority must be in 0..{MAX_PRIORITY}, got {one.priority}"),
        (0 <= one.min_delta < inf, f"eval.min_delta must be a finite number >= 0, got {one.min_delta}"),
        (-inf < one.pass_above < inf, f"eval.pass_above must be a finite number, got {one.pass_above}"),
        (
            one.n == 1 or one.temperature > 0,
            f"eval.n {one.n} with eval.temperature 0: greedy answers to a prompt are all the same; set "
            "eval.temperature to that of sampling, or eval.n to 1",
        ),
    ]
    try:
        eval_sampling(config)
    except ValueError as error:
        found.append((False, f"eval: {error}"))
    return found


def eval_sampling(config: Config) -> SamplingParams:
    """How held-out prompts are answered. Raises ValueError."""
    one, usual = config.eval, config.sampling
    longest = usual.max_new_tokens if one.max_new_tokens is None else one.max_new_tokens
    return replace(usual, temperature=one.temperature, top_p=one.top_p, max_new_tokens=longest)


def eval_config(config: Config) -> Config:
    """The configuration with the held-out prompts in the place of those that are trained on."""
    one = config.eval
    return replace(
        config,
        data=DataConfig(path=one.data, format=one.format, limit=one.limit),
        sampling=eval_sampling(config),
        producer=replace(config.producer, group_size=one.n),
        eval=EvalConfig(),
    )


def _evaluation_and_others(config: Config) -> Iterator[tuple[bool, str]]:
    one = config.eval
    yield (
        not one.data or one.data != config.data.path,
        f"eval.data is data.path ({one.data}): prompts that are trained on are not held out; name another file",
    )
    yield (
        not one.data or not config.deterministic,
        "eval.data with deterministic: an evaluation loads a version while rollouts need another; leave one out",
    )
    yield (
        one.patience is None or bool(one.data),
        "eval.patience does nothing without eval.data; name the held-out prompts, or leave it out",
    )


def _images(config: Config) -> list[tuple[bool, str]]:
    images = config.images
    names = (
        "max_mb",
        "max_pixels",
        "max_per_prompt",
        "tries",
        "store_mb",
        "fetch_timeout_s",
        "decode_timeout_s",
        "decode_processes",
    )
    positive = {name: getattr(images, name) for name in names}
    found = [
        (0 < value < inf, f"images.{key} must be a finite number > 0, got {value}") for key, value in positive.items()
    ]
    decode_s = images.decode_timeout_s
    found.append((decode_s <= _LONGEST_S, f"images.decode_timeout_s must be at most {_LONGEST_S}, got {decode_s}"))
    found.append((images.decode_mb >= 256, f"images.decode_mb must be >= 256, got {images.decode_mb}"))
    found.append((images.cache_mb >= 0, f"images.cache_mb must be >= 0, got {images.cache_mb}"))
    found.append((bool(images.formats), "images.formats is empty, so no image could be read; name at least one"))
    found.append((all(images.roots), "images.roots has an empty entry; write '.' for the working directory"))
    for key, hosts in (("images.hosts", images.hosts), ("rollout_server.hosts", config.rollout_server.hosts)):
        form = "'host', 'host:port' or 'host:*', an IPv6 address in brackets, without scheme or path"
        found += [(_is_host(host), f"{key}: {host!r} must be {form}") for host in hosts]
    return found


def _is_host(text: str) -> bool:
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|[\w.-]+)(?::(\d{1,5}|\*))?", text)
    if parts is None or (parts[2] not in (None, "*") and not 1 <= int(parts[2]) <= 65_535):
        return False
    try:
        return parts[1] is None or bool(IPv6Address(parts[1]))
    except ValueError:
        return False


MOST_IN_BROKER = 1_000_000
"""Sequences of one run that the broker may hold at once."""


def _sequences_for_a_batch(config: Config) -> int:
    """At most this many must be admitted before the trainer's batch is sure to fill.

    Each of several consumers may hold back all but one sample of a batch; partly trained groups leave a remainder.
    """
    producer, count = config.producer, config.consumer.count
    held = producer.samples_per_version - count if count > 1 else 0
    rest = producer.group_size - 1 if config.consumer.on_incomplete_group == "train_partial" else 0
    return producer.samples_per_version + held + rest


def _flow(config: Config) -> Iterator[tuple[bool, str]]:
    producer, worker = config.producer, config.worker
    yield (
        not config.trainer.external or config.trainer.max_versions is None,
        "trainer.max_versions applies to the built-in trainer, which trainer.external turns off; end your own loop "
        "instead",
    )
    yield (
        config.weights.dtype == "auto" or not config.trainer.external,
        f"weights.dtype {config.weights.dtype} applies to the built-in trainer, which trainer.external turns off: "
        "versions have the dtype of the model that your own loop publishes; leave it out",
    )
    yield (
        config.weights.dtype != "bfloat16" or not config.trainer.lora.enabled,
        "weights.dtype bfloat16 with trainer.lora: an adapter is published in float32, and merged before the engine "
        "rounds; leave it out",
    )
    yield (
        config.broker.sentinel_master is None or not config.broker.cluster,
        f"broker.sentinel_master {config.broker.sentinel_master} and broker.cluster are both set: Sentinels watch "
        "single servers, and a cluster watches itself; remove one of them",
    )
    groups = producer.samples_per_version // producer.group_size
    yield (
        config.trainer.minibatches <= max(1, groups),
        f"trainer.minibatches {config.trainer.minibatches} is above {groups}, the groups in a batch "
        "(producer.samples_per_version / producer.group_size); lower it",
    )
    yield (
        worker.renew_s * 2 <= worker.lease_s,
        f"worker.renew_s {worker.renew_s} must be at most half of worker.lease_s {worker.lease_s}, "
        "or one missed renewal loses the lease",
    )
    needed = _sequences_for_a_batch(config)
    yield (
        producer.max_in_flight >= needed,
        f"producer.max_in_flight {producer.max_in_flight} is below {needed}, which a step may need "
        "(samples_per_version, and what consumers hold): the trainer's batch could never fill; raise it",
    )
    needed = _sequences_for_a_batch(config)  # again: what is read since the last rule is what this one reads
    yield (
        (producer.max_staleness + 1) * producer.samples_per_version * config.trainer.publish_every >= needed,
        f"producer.max_staleness {producer.max_staleness} admits fewer than the {needed} sequences that a step may "
        "need with these consumers; raise it",
    )
    unsaved, doubled = (2, "2 x ") if config.trainer.async_checkpoints else (1, "")
    held = producer.max_in_flight + producer.samples_per_version * config.trainer.checkpoint_every * unsaved
    yield (
        held <= MOST_IN_BROKER,
        f"the broker may hold {held:,} sequences at once (producer.max_in_flight + {doubled}trainer.checkpoint_every x "
        f"producer.samples_per_version), more than {MOST_IN_BROKER:,}: steps keep theirs there until a checkpoint "
        "holds them; lower trainer.checkpoint_every or producer.max_in_flight",
    )
    yield (
        producer.samples_per_version % (config.consumer.count * producer.group_size) == 0,
        f"producer.samples_per_version {producer.samples_per_version} must be a multiple of "
        f"consumer.count x producer.group_size = {config.consumer.count} x {producer.group_size}",
    )
    yield (
        worker.drain_s < config.up.stop_grace_s,
        f"worker.drain_s {worker.drain_s} must be below up.stop_grace_s {config.up.stop_grace_s}, "
        "or a draining worker is cut off before it hands its jobs back",
    )
    yield (
        config.weights.retention >= producer.max_staleness + 2,
        f"weights.retention {config.weights.retention} must be >= producer.max_staleness + 2 "
        f"= {producer.max_staleness + 2}",
    )


def _ranks(config: Config) -> Iterator[tuple[bool, str]]:
    """What a trainer of several processes leaves out."""
    trainer = config.trainer
    shared = trainer.tensor_parallel
    yield (
        shared == 1 or trainer.ranks in (1, shared),
        f"trainer.tensor_parallel {shared} with trainer.ranks {trainer.ranks}: it isn't combined with FSDP; set "
        f"trainer.ranks to {shared}, or trainer.tensor_parallel to 1",
    )
    yield (
        shared == 1 or (trainer.fsdp == FsdpConfig() and not trainer.lora.enabled),
        f"trainer.tensor_parallel {shared} with trainer.{'lora' if trainer.lora.enabled else 'fsdp'}: only one of them "
        "splits the model; remove one",
    )
    yield (
        shared == 1 or not trainer.async_checkpoints,
        f"trainer.tensor_parallel {shared} with trainer.async_checkpoints: its parts can't be copied aside; remove one",
    )
    if trainer.ranks == 1:
        return
    for key, value, why in (
        ("dropout", False, "checkpoints hold the random state of one process"),
        ("claim_gpu", False, "it claims one GPU"),
        ("optimizer", "adamw", "the others can't be sharded"),
    ):
        found = getattr(trainer, key)
        yield (
            found == value,
            f"trainer.{key} {_shown(found)} with trainer.ranks {trainer.ranks}: {why}; set it to {_shown(value)}",
        )
    dropout = trainer.lora.dropout
    yield (
        not dropout,
        f"trainer.lora.dropout {dropout} with trainer.ranks {trainer.ranks}: checkpoints hold the random state of one "
        "process; set it to 0",
    )


_ALL_VISIBLE = ("auto", "balanced", "balanced_low_0", "sequential")  # transformers' words for it


def _device_map(config: Config) -> Iterator[tuple[bool, str]]:
    """A model on several GPUs, and a claim that leaves one visible: it would be placed on that one."""
    spread, worker = config.model.device_map in _ALL_VISIBLE, config.worker
    for section, claims in (
        ("worker", worker.claim_gpu and "hf" in (worker.backend, worker.fallback_backend)),
        ("scorer", config.scorer.claim_gpu),
    ):
        yield (
            not (spread and claims),
            f"model.device_map {config.model.device_map} with {section}.claim_gpu true, which leaves one GPU visible; "
            f"set {section}.claim_gpu to false, or model.device_map to null",
        )


def _deterministic(config: Config) -> Iterator[tuple[bool, str]]:
    """What `deterministic` needs: what is left to time or to a neighbour in a pass changes bits."""
    if not config.deterministic:
        return
    needed: dict[str, tuple[object, str]] = {
        "worker.backend": ("hf", "vLLM's passes depend on what else runs"),
        "worker.fallback_backend": (None, "it would decode differently"),
        "worker.max_batch": (1, "a row's bits depend on its neighbours"),
        "worker.checkpoint_tokens": (0, "a killed sequence restarts at its prompt"),
        "model.device": ("cpu", "kernels of a GPU add in any order"),
        "model.device_map": (None, "the model is on one device"),
        "consumer.count": (1, "one process puts the rows in order"),
        "data.on_malformed": ("stop", "every row has its place in a step"),
        "trainer.external": (False, "it applies to the built-in trainer"),
        "trainer.ranks": (1, "the order in which ranks add depends on their number"),
        "trainer.publish_every": (1, "a version's number is that of its step"),
        "trainer.async_checkpoints": (False, "bits after kills were proved with checkpoints that are waited for"),
        "policy.zero_variance": ("keep", "what takes a dropped group's place depends on time"),
        "rollout.url": (None, "a rollout has no version of its own"),
        "rollout_server.count": (0, "a rollout has no version of its own"),
        "gateway.count": (0, "what its callers ask has no place in a step"),
    }
    for key, (value, why) in needed.items():
        section, _, name = key.partition(".")
        found = getattr(getattr(config, section), name)
        yield found == value, f"{key} {_shown(found)} with deterministic: {why}; set it to {_shown(value)}"
    passes = config.scorer.pass_tokens
    yield (
        passes == 1 or not (config.policy.enabled and config.scorer.count),
        f"scorer.pass_tokens {passes} with deterministic: a row's bits depend on its neighbours; set it to 1",
    )
    for section in ("worker", "scorer", "trainer"):
        threads = getattr(config, section).torch_threads
        yield threads >= 1, f"{section}.torch_threads {threads} with deterministic: set how many, such as 1"
    optimizer = config.trainer.optimizer
    yield (
        optimizer != "adamw_8bit",
        f"trainer.optimizer {optimizer} with deterministic: its kernels promise no bits; set it to adamw or muon",
    )
    kept, least = config.weights.retention, config.producer.max_staleness + config.trainer.checkpoint_every + 1
    yield (
        kept >= least,
        f"weights.retention {kept} must be >= producer.max_staleness + trainer.checkpoint_every + 1 = {least} with "
        "deterministic: after a kill, steps since the last checkpoint need the versions of that time again",
    )


def _shown(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def policy_warnings(config: Config) -> list[str]:
    """What is allowed of a policy loss, and should be known."""
    policy, sampling = config.policy, config.sampling
    if not policy.enabled:
        return [*_without_effect(policy), *own_loop_warnings(config)]
    found = own_loop_warnings(config)
    names = ("temperature", "top_p", "top_k", "min_p", *RESHAPING)
    exact = {name: getattr(SamplingParams(), name) for name in names}
    changed = [
        f"sampling.{key} {getattr(sampling, key)}" for key, value in exact.items() if getattr(sampling, key) != value
    ]
    if changed and config.worker.logprobs_mode == "raw":
        found.append(
            f"{', '.join(changed)}: logprobs are raw, so importance ratios are those of the raw policy, not of the "
            "sampler that drew the tokens; for exact ratios set temperature and top_p to 1, top_k to 0 and "
            "repetition_penalty to 1, leave the others out, or, if only the temperature differs, set "
            "worker.logprobs_mode to processed (hf)"
        )
    if config.scorer.count == 0 and config.producer.max_staleness >= 2:
        found.append(
            f"scorer.count 0 with producer.max_staleness {config.producer.max_staleness}: tokens two versions back get "
            f"no proximal logprob, and policy.on_missing_proximal {config.policy.on_missing_proximal} decides; set "
            "scorer.count to 1 or more to have them scored"
        )
    if config.scorer.count == 0 and config.trainer.publish_every > 1:
        found.append(
            f"scorer.count 0 with trainer.publish_every {config.trainer.publish_every}: between two versions the "
            "trainer's weights are none of them, so tokens one version back get no proximal logprob, and "
            f"policy.on_missing_proximal {config.policy.on_missing_proximal} decides; set scorer.count to 1 or more to "
            "have them scored"
        )
    bound, kept = config.policy.max_token_staleness, config.weights.retention
    if bound > kept:
        found.append(
            f"policy.max_token_staleness {bound} is above weights.retention {kept}: the versions that would score the "
            f"oldest tokens are gone, and policy.on_missing_proximal {config.policy.on_missing_proximal} decides; "
            "raise weights.retention"
        )
    overlong, longest = policy.overlong_tokens, sampling.max_new_tokens
    if overlong is not None and config.rollout.url is None and overlong - policy.overlong_buffer >= longest:
        found.append(
            f"policy.overlong_tokens {overlong} does nothing: no sequence is longer than overlong_tokens - "
            f"overlong_buffer ({overlong - policy.overlong_buffer}), since sampling.max_new_tokens is {longest}; "
            "lower it"
        )
    if policy.kl_coef and policy.kl_estimator == "k1":
        found.append(
            "policy.kl_estimator k1: on tokens of the trainer's own version its gradient is 0 on average, so it holds "
            "the weights to nothing; set it to k2 or k3"
        )
    if policy.clip_eps_high is not None and policy.clip_eps_high < policy.clip_eps:
        found.append(
            f"policy.clip_eps_high {policy.clip_eps_high} is below policy.clip_eps {policy.clip_eps}: unlikely tokens "
            "grow less than they may fall; set both (policy.loss may set one of them by its name)"
        )
    return found


def own_loop_warnings(config: Config) -> list[str]:
    """What only the built-in trainer reads, if the loop is the user's own."""
    policy, usual = config.policy, PolicyConfig()
    if not config.trainer.external:
        return []
    names = [name for name in ("kl_coef", "entropy_coef", "mismatch") if getattr(policy, name) != getattr(usual, name)]
    # A loss by its name may set the advantage, and pairs change the filter: both are the consumers'.
    if ":" in policy.loss or (policy.by_pairs and policy.zero_variance == "keep"):
        names = ["loss", *names]
    found = [f"policy.{name} {getattr(policy, name)}" for name in names if policy.enabled]
    if config.trainer.minibatches > 1:
        found.append(f"trainer.minibatches {config.trainer.minibatches}")
    if config.trainer.ranks > 1:
        found.append(f"trainer.ranks {config.trainer.ranks}")
    if config.trainer.lora.enabled:
        found.append("trainer.lora")
    if not found:
        return []
    return [
        f"{', '.join(found)}: without effect, since trainer.external is true and your own loop has the loss and the "
        "optimiser; leave them out, or do the same in your loop"
    ]


def _without_effect(policy: PolicyConfig) -> list[str]:
    names = (
        "loss",
        "entropy_coef",
        "kl_coef",
        "mismatch",
        "zero_variance",
        "mask_truncated",
        "overlong_tokens",
        "ce_weight",
    )
    usual = PolicyConfig()
    changed = [name for name in names if getattr(policy, name) != getattr(usual, name)]
    if not changed:
        return []
    listed = ", ".join(f"policy.{name} {getattr(policy, name)}" for name in changed)
    return [f"{listed}: without effect, since policy.enabled is false; set it to true to train on rewards"]


def _policy_numbers(config: Config) -> list[tuple[bool, str]]:
    policy = config.policy
    high, dual, floor, cap = policy.clip_eps_high, policy.dual_clip, policy.weight_floor, policy.weight_cap
    wait_s, bound, overlong = policy.score_wait_s, policy.max_token_staleness, policy.overlong_tokens
    usual, of_tokens = PolicyConfig(), ("kl_coef", "entropy_coef", "mismatch", "dual_clip", "aggregation")
    useless = [
        f"policy.{name} {getattr(policy, name)}"
        for name in of_tokens
        if policy.by_pairs and getattr(policy, name) != getattr(usual, name)
    ]
    return [
        (
            ":" in policy.loss or policy.loss in CONVENTIONS,
            f"policy.loss: no loss is called {policy.loss!r}; {did_you_mean(policy.loss, list(CONVENTIONS))} "
            "(your own is file.py:name or package.module:name)",
        ),
        (
            policy.aggregation_tokens >= 1,
            f"policy.aggregation_tokens {policy.aggregation_tokens} must be at least 1, as sampling.max_new_tokens is",
        ),
        (
            0 <= policy.entropy_coef < inf,
            f"policy.entropy_coef {policy.entropy_coef} must be a finite number of at least 0, 0 for none",
        ),
        (
            0 <= policy.kl_coef < inf,
            f"policy.kl_coef {policy.kl_coef} must be a finite number of at least 0, 0 for none",
        ),
        (
            isinstance(policy.kl_reference, str) or policy.kl_reference >= 0,
            f"policy.kl_reference {policy.kl_reference} must be a weight version, 0 for what the run started from, or "
            "a model directory",
        ),
        (
            1 < policy.mismatch_cap < inf,
            f"policy.mismatch_cap {policy.mismatch_cap} must be a finite number above 1, such as 2",
        ),
        (
            overlong is None or 0 <= policy.overlong_buffer <= overlong,
            f"policy.overlong_buffer {policy.overlong_buffer} must be in 0..overlong_tokens ({overlong})",
        ),
        (
            overlong is not None or policy.overlong_buffer == 0,
            f"policy.overlong_buffer {policy.overlong_buffer} does nothing without policy.overlong_tokens; set both",
        ),
        (
            policy.zero_variance == "keep" or policy.advantage not in ("reward", "reinforce_pp"),
            f"policy.zero_variance filter with policy.advantage {policy.advantage}: equal rewards have an advantage "
            "there; set it to keep",
        ),
        (
            not useless,
            f"{', '.join(useless)}: nothing uses it with policy.loss dpo, which is held to its reference by "
            "policy.dpo_beta; leave it out",
        ),
        (
            0 < policy.dpo_beta < inf,
            f"policy.dpo_beta {policy.dpo_beta} must be a finite number above 0, such as 0.1",
        ),
        (
            dual is None or policy.loss != "cispo",
            f"policy.dual_clip {dual} does nothing with policy.loss cispo, which bounds every ratio; set it to null",
        ),
        (
            0 < policy.clip_eps < 1 or (policy.clip_eps == 1 and policy.loss == "cispo"),
            f"policy.clip_eps {policy.clip_eps} must be between 0 and 1, such as 0.2 (1 is cispo's: no lower bound)",
        ),
        (high is None or 0 < high < inf, f"policy.clip_eps_high {high} must be above 0, or null for that of clip_eps"),
        (dual is None or 1 < dual < inf, f"policy.dual_clip {dual} must be above 1, such as 3, or null for none"),
        (0 <= floor < 1, f"policy.weight_floor {floor} must be at least 0 and below 1: a weight of 1 is on-policy"),
        (cap >= 1, f"policy.weight_cap {cap} must be at least 1: a weight of 1 is on-policy"),
        (0 <= policy.ce_weight < inf, f"policy.ce_weight {policy.ce_weight} must be at least 0, 0 for none"),
        (0 < wait_s < inf, f"policy.score_wait_s {wait_s} must be a number of seconds above 0"),
        (bound >= 0, f"policy.max_token_staleness {bound} must be at least 0, which trains on-policy tokens only"),
    ]


def _scorer_counts(config: Config) -> list[tuple[bool, str]]:
    scorer, kept = config.scorer, config.trainer.keep_rollouts
    return [
        (scorer.count >= 0, f"scorer.count {scorer.count} must be at least 0, 0 for no scorer"),
        (scorer.pass_tokens >= 1, f"scorer.pass_tokens {scorer.pass_tokens} must be at least 1, such as 8192"),
        (0 < scorer.lease_s < inf, f"scorer.lease_s {scorer.lease_s} must be above 0 and finite, such as 30"),
        (kept is None or kept >= 0, f"trainer.keep_rollouts {kept} must be at least 0, 0 for none, or null for all"),
    ]


def _policy_and_others(config: Config) -> Iterator[tuple[bool, str]]:
    policy, size = config.policy, config.producer.group_size
    batch = config.producer.samples_per_version
    by_group = policy.advantage not in ("reward", "reinforce_pp")
    processed, sampling = config.worker.logprobs_mode == "processed", config.sampling
    truncates = sampling.top_p < 1 or sampling.top_k or sampling.min_p
    plain = not truncates and not sampling.reshapes(SamplingParams())
    dropout = "trainer.lora.dropout" if config.trainer.lora.dropout else ""
    dropout = "trainer.dropout" if config.trainer.dropout else dropout
    yield (
        not processed or config.worker.backend == "hf",
        "worker.logprobs_mode processed needs worker.backend hf: vLLM's decode and re-score agree only on raw "
        "logprobs; set it to raw",
    )
    yield (
        not config.weights.keep_cache or config.worker.backend == "hf",
        "weights.keep_cache needs worker.backend hf: vLLM decodes nothing under weights that aren't proved yet, so its "
        "running sequences are taken out for the proof; set it to false",
    )
    yield (
        not processed or plain,
        "worker.logprobs_mode processed supports a temperature only: a token that top_p, top_k or a penalty "
        "excludes under the next version has no logprob there; set sampling.top_p 1, top_k 0, repetition_penalty 1, "
        "and leave the others out",
    )
    yield (
        policy.reference is None or config.scorer.count > 0,
        f"policy.{'loss dpo' if policy.by_pairs else f'kl_coef {policy.kl_coef}'} needs scorer.count of at least "
        "1: scorers score the reference",
    )
    yield (
        not policy.enabled or not policy.by_pairs or size >= 2,
        f"producer.group_size {size} must be at least 2 with policy.loss dpo, which compares the best of a group "
        "with its worst; raise it",
    )
    yield (
        not policy.by_pairs or not dropout,
        f"policy.loss dpo with {dropout}: pairs are compared without it; switch it off",
    )
    yield (
        policy.mismatch == "none" or not dropout,
        f"policy.mismatch {policy.mismatch} with {dropout}: dropout would be measured too; switch one off",
    )
    yield (
        not policy.enabled or not by_group or size >= 2,
        f"producer.group_size {size} must be at least 2 with policy.advantage {policy.advantage}, or every "
        "advantage is 0; raise it, or set policy.advantage to reward",
    )
    yield (
        not policy.enabled or policy.advantage != "reinforce_pp" or batch >= 2,
        f"producer.samples_per_version {batch} must be at least 2 with policy.advantage reinforce_pp, or every "
        "advantage is 0; raise it, or set policy.advantage to reward",
    )


_BETWEEN = (_flow, _policy_and_others, _ranks, _device_map, _deterministic, _evaluation_and_others, _adapters)

REWARD_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}"
MAX_REWARD_PARTS = 32  # of one run: each is a metric


def _rewards(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) for each rule."""
    matching, key = config.rollout_matching, "rollout_matching.reward"
    timeout_s, terms = matching.reward_timeout_s, matching.reward
    found = [
        (0 < timeout_s < inf, f"rollout_matching.reward_timeout_s must be a finite number > 0, got {timeout_s}"),
        (
            matching.reward_concurrency >= 1,
            f"rollout_matching.reward_concurrency must be >= 1, got {matching.reward_concurrency}",
        ),
        (
            terms is None or config.policy.enabled,
            f"{key} needs policy.enabled: rewards train through the policy loss alone; set it to true",
        ),
        (terms not in ("", ()), f"{key} names no function; write file.py:name, or remove it"),
    ]
    if not isinstance(terms, tuple):
        return found
    names = [term.name for term in terms]
    found.append((len(terms) <= MAX_REWARD_PARTS, f"{key} has {len(terms)} entries; at most {MAX_REWARD_PARTS}"))
    for at, term in enumerate(terms):
        form = "1-48 letters, digits, '_', '.' or '-', beginning with a letter or digit"
        found += [
            (bool(re.fullmatch(REWARD_NAME, term.name)), f"{key}[{at}].name {term.name!r}: use {form}"),
            (names.index(term.name) == at, f"{key}[{at}].name {term.name!r} is used twice; name them differently"),
            (
                term.name != "overlong" or config.policy.overlong_tokens is None,
                f"{key}[{at}].name 'overlong' is the metric of policy.overlong_tokens; name it differently",
            ),
            (-inf < term.weight < inf, f"{key}[{at}].weight must be a finite number, got {term.weight}"),
        ]
    return found


_LAST_PORT = 65_535


def _rollouts(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) for each rule."""
    gateway, server, rollout = config.gateway, config.rollout_server, config.rollout
    positive = {
        "gateway.max_requests": gateway.max_requests,
        "gateway.request_timeout_s": gateway.request_timeout_s,
        "gateway.rollout_ttl_s": gateway.rollout_ttl_s,
        "gateway.stream_tokens": gateway.stream_tokens,
        "gateway.max_body_mb": gateway.max_body_mb,
        "rollout_server.tokenizer_cache_size": server.tokenizer_cache_size,
        "rollout_server.http_client_timeout_s": server.http_client_timeout_s,
        "rollout_server.max_concurrent_rollouts": server.max_concurrent_rollouts,
        "rollout_server.deadline_s": server.deadline_s,
        "rollout_server.keep_answers_s": server.keep_answers_s,
        "rollout_server.keep_answers": server.keep_answers,
        "rollout_server.tool_timeout_s": server.tool_timeout_s,
        "rollout_server.max_tool_calls": server.max_tool_calls,
        "rollout_server.tool_threads": server.tool_threads,
        "rollout_server.max_body_mb": server.max_body_mb,
        "rollout.max_concurrent": rollout.max_concurrent,
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_tokens_total": rollout.max_tokens_total,
        "rollout.timeout_s": rollout.timeout_s,
    }
    found = [(0 < value < inf, f"{key} must be a finite number > 0, got {value}") for key, value in positive.items()]
    not_negative = {
        "gateway.count": gateway.count,
        "rollout_server.count": server.count,
        "rollout_server.max_waiting_rollouts": server.max_waiting_rollouts,
    }
    found += [(value >= 0, f"{key} must be >= 0, got {value}") for key, value in not_negative.items()]
    for name, section in (("gateway", gateway), ("rollout_server", server)):
        last = section.port + max(0, section.count - 1)
        complaint = f"{name}.port must be in 0..{_LAST_PORT}, that of the last of {name}.count too, got {section.port}"
        found.append((section.port >= 0 and last <= _LAST_PORT, complaint))
    low, high = server.tool_latency_ms
    found.append((0 <= low <= high, f"rollout_server.tool_latency_ms must be [low, high], 0 <= low, got {[low, high]}"))
    ttl, call = gateway.rollout_ttl_s, gateway.request_timeout_s
    complaint = f"gateway.rollout_ttl_s must be > gateway.request_timeout_s ({call:g}), the longest call: {ttl:g}"
    found.append((ttl > call, complaint))
    return found


def _what_a_rollout_server_takes(config: Config) -> list[tuple[bool, str]]:
    """What a rollout server would refuse."""
    rollout, budget = config.rollout, config.rollout.max_tokens_total
    found = [
        (rollout.max_turns <= 100, f"rollout.max_turns must be <= 100, got {rollout.max_turns}"),
        (budget <= 1_000_000, f"rollout.max_tokens_total must be <= 1000000, got {budget}"),
    ]
    if rollout.url is not None:
        warmest, longest = config.sampling.temperature, config.sampling.max_new_tokens
        found.append((warmest <= 2, f"sampling.temperature must be <= 2 with rollout.url, got {warmest}"))
        found.append((longest <= 32_768, f"sampling.max_new_tokens must be <= 32768 with rollout.url, got {longest}"))
    return found


def _tracing(tracing: TracingConfig) -> list[tuple[bool, str]]:
    endpoint, ratio = _parts(tracing.endpoint), tracing.sample_ratio
    is_url = endpoint.scheme in ("http", "https") and bool(endpoint.netloc)
    return [
        # Where tracing is off, its variable may be there for other programs of the host, in a form that they take.
        (
            is_url or not tracing.enabled,
            f"tracing.endpoint must be http://HOST:PORT or https://…, got {tracing.endpoint!r}",
        ),
        (0 <= ratio <= 1, f"tracing.sample_ratio must be in 0..1, got {ratio}"),
        (tracing.max_queue >= 1, f"tracing.max_queue must be >= 1, got {tracing.max_queue}"),
        (0 < tracing.timeout_s < inf, f"tracing.timeout_s must be a finite number above 0, got {tracing.timeout_s}"),
    ]


def _history_and_servers(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) each."""
    history, metrics, dashboard = config.history, config.metrics, config.dashboard
    scan_s = config.preflight.max_s
    return [
        (0 <= scan_s <= _LONGEST_S, f"preflight.max_s must be in 0..{_LONGEST_S}, got {scan_s}"),
        (history.max_sequences >= 1, f"history.max_sequences must be >= 1, got {history.max_sequences}"),
        (history.max_mb >= 1, f"history.max_mb must be >= 1, got {history.max_mb}"),
        (0 <= metrics.port < 65_536, f"metrics.port must be in 0..65535, got {metrics.port}"),
        *_tracing(config.tracing),
        (0 <= dashboard.port < 65_536, f"dashboard.port must be in 0..65535, got {dashboard.port}"),
        (0 < dashboard.max_body_mb <= 64, f"dashboard.max_body_mb must be in 0..64, got {dashboard.max_body_mb}"),
    ]
