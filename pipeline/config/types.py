"""The configuration as frozen types. A YAML file is the source of behaviour; every key is listed here.

Units are in the names (`_s` seconds, `_mb` mebibytes, `num_` counts). Cross-field rules: pipeline/config/rules.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.engine_types import ModelConfig, VllmEngineOptions
from pipeline.config.image_types import ImagesConfig
from pipeline.config.operate_types import DashboardConfig, HistoryConfig, MetricsConfig, TrackingConfig
from pipeline.config.policy_types import PolicyConfig, ScorerConfig
from pipeline.config.rollout_types import GatewayConfig, RolloutConfig, RolloutServerConfig
from pipeline.config.section import Section
from pipeline.messages import SamplingParams


class BrokerConfig(Section, frozen=True, kw_only=True):
    """`url` wins over the embedded broker; the variable REDIS_URL wins over `url`."""

    url: str | None = None  # redis://:password@host:6379/0; rediss:// for TLS
    embedded_dir: str = ".sluice/broker"  # where the embedded broker keeps its data
    socket_timeout_s: float = 10.0  # of one answer
    connect_timeout_s: float = 5.0
    retry_for_s: float = 90.0  # an outage shorter than this stops no process
    sentinel_master: str | None = None  # then `url` names the Sentinels: redis://:pw@host:26379,host2:26379/0
    allow_volatile: bool = False  # take a broker without an append-only file: its restart loses what is in flight
    cluster: bool = False  # then `url` names nodes of a Redis Cluster: redis://:pw@host:6379,host2:6379/0


class DataConfig(Section, frozen=True, kw_only=True):
    """The prompts: rows of `messages` with optional `truth` and `id`."""

    path: str = ""  # JSONL, Parquet, a saved data set, or hf:NAME[:CONFIG][:SPLIT]; --data of `run`
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"  # auto: by the path
    epochs: int = 1  # how often the rows are read
    limit: int | None = None  # rows per epoch
    on_malformed: Literal["stop", "skip"] = "stop"  # skip: counted, and the run goes on


class ProducerConfig(Section, frozen=True, kw_only=True):
    """Admission: how far decoding may run ahead of training."""

    group_size: int = 1  # sequences per prompt
    max_in_flight: int = 512  # sequences from enqueue to the trainer's ack
    max_in_flight_mb: int = 1024  # what they hold in the broker, results, batches and dead letters included
    samples_per_version: int = 64  # the trainer's batch, in sequences
    max_staleness: int = 2  # versions
    poll_s: float = 0.05  # how often admission looks again


class WorkerConfig(Section, frozen=True, kw_only=True):
    """Decode workers; one process per engine."""

    count: int = 1  # that `up` and `run` start on this host
    backend: Literal["hf", "vllm"] = "hf"  # hf: correctness first; vllm: fast
    fallback_backend: Literal["hf"] | None = None  # for jobs that `backend` cannot decode; None: they fail
    vllm: VllmEngineOptions = VllmEngineOptions()
    logprobs_mode: Literal["raw", "processed"] = "raw"  # processed: at the sampling temperature; hf alone
    max_batch: int = 32  # sequences that one engine decodes at a time
    lease_s: float = 15.0  # a worker that is silent for this long loses its jobs
    renew_s: float = 5.0  # at most half of lease_s
    stall_timeout_s: float = 120.0  # an engine without progress for this long loses its jobs
    max_attempts: int = 3  # deaths of a worker over a job that ran alone before it is a dead letter
    checkpoint_tokens: int = 256  # a running sequence is stored this often; 0 = never
    keep_result_s: float = 3600.0  # how long an ended job's id is known, and arq's Job.result answers
    drain_s: float = 20.0  # time to finish on SIGTERM before jobs are handed back
    poll_s: float = 0.05  # how often a worker looks, when nothing wakes it; of many idle ones one does
    torch_threads: int = 1  # 0 = torch's own choice
    claim_gpu: bool = True  # lock one free GPU of the host, where there are GPUs


class ConsumerConfig(Section, frozen=True, kw_only=True):
    """Parse, match and pack."""

    count: int = 1  # partitions of the result stream, one process each
    on_incomplete_group: Literal["train_partial", "drop"] = "drop"  # a group of which a member died
    row_tokens: int = 1024  # token budget of a packed row
    max_sample_tokens: int = 32_768  # longer samples (prompt and target) are dropped, reason too_long
    poll_s: float = 0.05  # how often it looks for results


class RepeatTerminateConfig(Section, frozen=True, kw_only=True):
    """Ends a looping sequence during decode; see the contract of the guard."""

    enabled: bool = False  # a worker on which the guard does not fire does not start
    min_new_tokens: int = 256  # no rule fires before
    max_consecutive_token_repeats: int | None = 64  # one token so often in a row; null: off
    ngram_size: int | None = 64  # tokens of a block; null: off
    ngram_repeats: int = 2  # equal blocks in a row
    any_period: bool = False  # any period up to ngram_size, looked at every 16 tokens; equal rows of a table are one
    max_object_keys: int | None = None  # null: off
    object_key_prefix: str = '"object_'  # text that max_object_keys counts, however it is cut into tokens


class RolloutMatchingConfig(Section, frozen=True, kw_only=True):
    """What the consumers do with a rollout."""

    task: str = "detection"  # detection | exact_answer, or a key of your own with the three import paths below
    parse: str | None = None  # "package.module:function"; None = that of the task
    match: str | None = None  # likewise
    target: str | None = None  # likewise
    grammar: Literal["object_n", "objects"] = "object_n"  # of detection: {"object_1": {…}, …} or {"objects": [{…}, …]}
    matched_supervision: Literal["truth_labels", "geometry"] = "truth_labels"  # geometry: boxes are regressed
    desc_ce_weight: float = 1.0  # of the cross-entropy on appended descriptions
    gt_only_fraction: float = 0.0  # share of sequences that are trained on the truth alone
    match_top_k: int = 10  # truths with the highest IoU that a prediction may match; ties: the nearer centre
    iou_gate: float = 0.3  # pairs below it are no match
    fp_cost: float = 1.0  # of a prediction without a truth
    fn_cost: float = 1.0  # of a truth without a prediction
    max_objects: int = 256  # longer lists are cut and flagged
    max_text_chars: int = 200_000  # longer answers are cut before they are parsed
    repeat_terminate: RepeatTerminateConfig = RepeatTerminateConfig()


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The optimiser and its rhythm; losses: teacher-forced here, policy in PolicyConfig."""

    external: bool = False  # a training loop of your own takes the batches; `up` and `run` start no trainer
    learning_rate: float = 1e-4  # of AdamW, after the warm-up
    warmup_steps: int = 0  # optimiser steps
    weight_decay: float = 0.0  # of AdamW
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    max_grad_norm: float = 1.0  # gradients are clipped to it
    dropout: bool = False  # keep the rates of the model's config.json; false: all are 0
    micro_batch_tokens: int = 8192  # padded tokens of one forward pass
    smooth_l1_weight: float = 1.0  # of box regression
    ciou_weight: float = 1.0  # of box regression
    checkpoint_every: int = 1  # optimiser steps; a version is published from a durable checkpoint only
    keep_checkpoints: int = 2  # newest ones that stay on disk
    keep_rollouts: int | None = 0  # optimiser steps whose samples stay in <run_dir>/<run>/rollouts; None = all
    max_versions: int | None = None  # stop after this version
    claim_gpu: bool = False  # lock a GPU, so that workers on this host leave it alone
    batch_wait_s: float = 600.0  # no batch for this long is an error that names what was waited for
    torch_threads: int = 1  # 0 = torch's own choice


class WeightsConfig(Section, frozen=True, kw_only=True):
    """Published versions."""

    retention: int = 4  # newest versions that stay on disk; >= max_staleness + 2
    load_timeout_s: float = 600.0  # a worker that has not loaded a version by then ends, its jobs go back
    probe_tokens: int = 16  # length of the prompt by which a loaded version is proved
    probe_tolerance: float = 1e-2  # nats a probe token between trainer and worker; ten times that in half precision


class UpConfig(Section, frozen=True, kw_only=True):
    """The supervisor of `sluice up` and `sluice run`."""

    restart_backoff_s: float = 0.5  # before the first restart; it doubles
    restart_backoff_max_s: float = 30.0
    max_restarts: int = 20  # of one process within `restart_window_s`; a poison job may cost 10
    restart_window_s: float = 300.0
    stop_grace_s: float = 30.0  # from SIGTERM to SIGKILL


class Config(Section, frozen=True, kw_only=True):
    """One run."""

    run: str = "default"  # prefix of its names in Redis, and its folder
    seed: int = 0  # of sampling; a sequence's own comes from it, its job and its index
    run_dir: str = ".sluice/runs"  # the run's files go to <run_dir>/<run>
    broker: BrokerConfig = BrokerConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingParams = SamplingParams()
    producer: ProducerConfig = ProducerConfig()
    worker: WorkerConfig = WorkerConfig()
    images: ImagesConfig = ImagesConfig()
    consumer: ConsumerConfig = ConsumerConfig()
    rollout_matching: RolloutMatchingConfig = RolloutMatchingConfig()
    trainer: TrainerConfig = TrainerConfig()
    policy: PolicyConfig = PolicyConfig()
    scorer: ScorerConfig = ScorerConfig()
    weights: WeightsConfig = WeightsConfig()
    gateway: GatewayConfig = GatewayConfig()
    rollout_server: RolloutServerConfig = RolloutServerConfig()
    rollout: RolloutConfig = RolloutConfig()
    history: HistoryConfig = HistoryConfig()
    metrics: MetricsConfig = MetricsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    tracking: TrackingConfig = TrackingConfig()
    up: UpConfig = UpConfig()
    custom: dict[str, Any] = {}  # free; custom.extra.rollout_matching is read as rollout_matching
