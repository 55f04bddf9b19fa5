"""Rules between keys. Each says which keys, why, and what to do."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from math import inf

from pipeline.config.operate_rules import operate_checks
from pipeline.config.policy_rules import policy_checks
from pipeline.config.rollout_rules import rollout_checks
from pipeline.config.types import Config, RepeatTerminateConfig
from pipeline.errors import ConfigError


def check(config: Config, origin: str) -> None:
    """Raise ConfigError at the first rule that does not hold."""
    for checks in (_identity, _numbers, _images, _flow, policy_checks, rollout_checks, operate_checks):
        for holds, complaint in checks(config):  # the later ones reckon with what the earlier ones admit
            if not holds:
                raise ConfigError(f"{origin}: {complaint}")
    check_guard(config.rollout_matching.repeat_terminate, origin, "rollout_matching.repeat_terminate")


def check_guard(guard: RepeatTerminateConfig, origin: str, where: str = "repeat_terminate") -> None:
    """Raise ConfigError for thresholds that no guard can have; `where` is the subtree's place in `origin`."""
    run, size, keys = guard.max_consecutive_token_repeats, guard.ngram_size, guard.max_object_keys
    blocks = bool(size and size > 0 and guard.ngram_repeats >= 2)
    off = not (run and run > 0) and not blocks and keys is None
    checks = (
        (guard.min_new_tokens >= 0, f"min_new_tokens must be >= 0, got {guard.min_new_tokens}"),
        (keys is None or keys >= 1, f"max_object_keys must be >= 1, or null for none, got {keys}"),
        (keys is None or bool(guard.object_key_prefix), "object_key_prefix is empty, and max_object_keys counts it"),
        (
            not re.search("[\ud800-\udfff]", guard.object_key_prefix),
            "object_key_prefix has half of a surrogate pair, which no token writes; write the character itself",
        ),
        (
            blocks or not guard.any_period,
            "any_period looks at the last ngram_size * ngram_repeats tokens; set ngram_size >= 1, ngram_repeats >= 2",
        ),
        (not (guard.enabled and off), "enabled is true, and every rule is off; set one of its thresholds"),
    )
    for holds, complaint in checks:
        if not holds:
            raise ConfigError(f"{origin}: {where}.{complaint}")


def _identity(config: Config) -> list[tuple[bool, str]]:
    return [
        (
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.run)),
            f"run {config.run!r}: use 1-64 letters, digits, '.', '_' or '-'",
        ),
    ]


def _numbers(config: Config) -> list[tuple[bool, str]]:
    positive = {
        "data.epochs": config.data.epochs,
        "producer.group_size": config.producer.group_size,
        "producer.samples_per_version": config.producer.samples_per_version,
        "producer.max_in_flight_mb": config.producer.max_in_flight_mb,
        "worker.max_batch": config.worker.max_batch,
        "worker.max_attempts": config.worker.max_attempts,
        "worker.renew_s": config.worker.renew_s,
        "consumer.count": config.consumer.count,
        "consumer.row_tokens": config.consumer.row_tokens,
        "trainer.checkpoint_every": config.trainer.checkpoint_every,
        "trainer.learning_rate": config.trainer.learning_rate,
        "trainer.max_grad_norm": config.trainer.max_grad_norm,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens,
        "trainer.keep_checkpoints": config.trainer.keep_checkpoints,
        "broker.socket_timeout_s": config.broker.socket_timeout_s,
        "weights.load_timeout_s": config.weights.load_timeout_s,
    }
    found = [(value > 0, f"{key} must be > 0, got {value}") for key, value in positive.items()]
    limit = config.data.limit
    found.append((limit is None or limit >= 0, f"data.limit must be >= 0, got {limit}"))
    fraction = config.rollout_matching.gt_only_fraction
    found.append((0 <= fraction <= 1, f"rollout_matching.gt_only_fraction must be in 0..1, got {fraction}"))
    for key in ("count", "checkpoint_tokens", "keep_result_s"):
        value = getattr(config.worker, key)
        found.append((value >= 0, f"worker.{key} must be >= 0, got {value}"))
    return found


def _images(config: Config) -> list[tuple[bool, str]]:
    images = config.images
    names = ("max_mb", "max_pixels", "fetch_timeout_s", "decode_timeout_s", "decode_processes")
    positive = {name: getattr(images, name) for name in names}
    found = [
        (0 < value < inf, f"images.{key} must be a finite number > 0, got {value}") for key, value in positive.items()
    ]
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


def _sequences_for_a_version(config: Config) -> int:
    """At most this many must be admitted before a version is sure to come out.

    Each of several consumers may hold back all but one sample of a batch; partly trained groups leave a remainder.
    """
    producer, count = config.producer, config.consumer.count
    held = producer.samples_per_version - count if count > 1 else 0
    rest = producer.group_size - 1 if config.consumer.on_incomplete_group == "train_partial" else 0
    return producer.samples_per_version * config.trainer.checkpoint_every + held + rest


def _flow(config: Config) -> list[tuple[bool, str]]:
    producer, worker = config.producer, config.worker
    return [
        (
            not config.trainer.external or config.trainer.max_versions is None,
            "trainer.max_versions is for the built-in trainer, and trainer.external leaves that out; end your own loop",
        ),
        (
            worker.renew_s * 2 <= worker.lease_s,
            f"worker.renew_s {worker.renew_s} must be at most half of worker.lease_s {worker.lease_s}, "
            "or one missed renewal loses the lease",
        ),
        (
            producer.max_in_flight >= _sequences_for_a_version(config),
            f"producer.max_in_flight {producer.max_in_flight} is below {_sequences_for_a_version(config)}, which a "
            "version may need (samples_per_version x checkpoint_every, and what consumers hold): the trainer's batch "
            "could never fill; raise it",
        ),
        (
            (producer.max_staleness + 1) * producer.samples_per_version * config.trainer.checkpoint_every
            >= _sequences_for_a_version(config),
            f"producer.max_staleness {producer.max_staleness} admits fewer than the "
            f"{_sequences_for_a_version(config)} sequences that a version may need with these consumers; raise it",
        ),
        (
            producer.samples_per_version % (config.consumer.count * producer.group_size) == 0,
            f"producer.samples_per_version {producer.samples_per_version} must be a multiple of "
            f"consumer.count x producer.group_size = {config.consumer.count} x {producer.group_size}",
        ),
        (
            worker.drain_s < config.up.stop_grace_s,
            f"worker.drain_s {worker.drain_s} must be below up.stop_grace_s {config.up.stop_grace_s}, "
            "or a draining worker is cut off before it hands its jobs back",
        ),
        (
            config.weights.retention >= producer.max_staleness + 2,
            f"weights.retention {config.weights.retention} must be >= producer.max_staleness + 2 "
            f"= {producer.max_staleness + 2}",
        ),
    ]
