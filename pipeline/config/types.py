"""The configuration as frozen types. A YAML file is the source of behaviour; every key is listed here.

- Units are in the names (`_s` seconds, `_mb` mebibytes, `num_` counts). Cross-field rules: rules.py.
- Keys of servers are no part of the configuration, which is stored with the run: SLUICE_GATEWAY_API_KEY,
  SLUICE_ROLLOUT_API_KEY and SLUICE_DASHBOARD_KEY are environment variables.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sluice.pipeline.wire.messages import REFERENCE_DIRECTORY, SamplingParams

BackendName = Literal["hf", "vllm"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section; unknown keys are refused."""


class VlmPreprocessOptions(Section, frozen=True, kw_only=True):
    """How images become model inputs; None leaves it to the model's own processor."""

    max_pixels: int | None = None  # larger images are scaled down
    min_pixels: int | None = None  # smaller images are scaled up
    do_resize: bool | None = None


class ModelConfig(Section, frozen=True, kw_only=True):
    """Where the policy comes from and how it is loaded."""

    path: str = ""  # made by save_pretrained, with tokenizer and chat template; --model of `run`
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    device: str = "auto"  # auto: CUDA where there is one, else cpu
    device_map: str | None = None  # passed to transformers, for a model on several devices; overrides `device`
    attn_implementation: str | None = None  # passed to transformers; null: its choice
    trust_remote_code: bool = False  # runs code of the model's directory
    variant: Literal["auto", "text", "vlm"] = "auto"  # auto: as the model is; text: takes no images
    preprocess: VlmPreprocessOptions = VlmPreprocessOptions()


class VllmEngineOptions(Section, frozen=True, kw_only=True):
    """The vLLM backend's engine; other options go into `extra`, under vLLM's own names."""

    gpu_memory_utilization: float = 0.9  # share of the GPU's memory
    kv_cache_gb: float | None = None  # on CPU; None: 1, or VLLM_CPU_KVCACHE_SPACE
    max_model_len: int | None = None  # tokens; None: the model's context
    enforce_eager: bool = False  # no CUDA graphs, no compilation: slower, but starts immediately
    tensor_parallel_size: int = 1  # GPUs of one engine
    extra: dict[str, Any] = {}


ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]


class ImagesConfig(Section, frozen=True, kw_only=True):
    """Nothing is allowed by default: paths need `roots`, URLs need `hosts`."""

    roots: tuple[str, ...] = ()  # directories from which image files may be read
    hosts: tuple[str, ...] = ()  # "host" (the scheme's own port), "host:port" or "[IPv6]:port"; no wildcards
    max_per_prompt: int = 16  # a prompt (all turns of a rollout) with more is refused before any of them is fetched
    store: str = ""  # directory for pictures that arrive as bytes, a root of every role; "": <run_dir>/<run>/images
    store_mb: int = 16384  # pictures in that directory, together; beyond it, new ones are refused
    max_mb: float = 20  # per encoded image
    max_pixels: int = 40_000_000  # width x height, checked before decoding
    formats: tuple[ImageFormat, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # by content, not by name
    fetch_timeout_s: float = 20  # per URL, including retries
    tries: int = 8  # of a decode job whose images can't be reached, with growing pauses (30 s at most); then it is dead
    cache_mb: int = 64  # decoded images kept by a process; trainer and scorers: as much of vision features; 0 = none
    decode_timeout_s: float = 10  # per image; then the decoding process is killed
    decode_mb: int = 2048  # address space of a decoding process; an image that needs more is refused
    decode_processes: int = 2  # concurrent decoding processes; started with the first image


class HistoryConfig(Section, frozen=True, kw_only=True):
    """Finished sequences, in <run_dir>/<run>/history: for the dashboard and for exports."""

    enabled: bool = True
    max_sequences: int = 200_000  # per consumer; the trainer keeps as many as all of them; the oldest are removed first
    max_mb: int = 2048  # per consumer file; the trainer's may be as large as all of these together


class MetricsConfig(Section, frozen=True, kw_only=True):
    """`/metrics` of every process, for Prometheus."""

    enabled: bool = True  # false: no server for it; what the dashboard, gateway and rollout server serve beside stays
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: any free port; each process's heartbeat names it


class TracingConfig(Section, frozen=True, kw_only=True):
    """Spans of every sequence, request and step, by OTLP to a collector; needs `pip install -e '.[otel]'`."""

    enabled: bool = False
    endpoint: str = "http://127.0.0.1:4317"  # of the collector, for gRPC; https:// for TLS
    sample_ratio: float = 1.0  # of the jobs that no request with a trace made; a caller's traceparent says it itself
    max_queue: int = 8192  # spans of a process that wait for the collector; more are dropped and counted
    timeout_s: float = 5.0  # for one batch of spans; then it is dropped


class DashboardConfig(Section, frozen=True, kw_only=True):
    """`sluice dashboard`: the run in a browser."""

    enabled: bool = True  # `up`, `run` and `demo` start one
    host: str = "127.0.0.1"  # where it listens; set a key before you leave loopback
    port: int = 8090  # if it is taken, `up`, `run` and `demo` use a free one; `dashboard` if it is the default
    allow_actions: bool = False  # replay and drop dead letters from the browser
    hosts: tuple[str, ...] = ()  # host names that browsers may use, in addition to localhost and its own address
    max_body_mb: float = 1  # per request


class TrackingConfig(Section, frozen=True, kw_only=True):
    """Where the trainer's metrics go in addition to <run_dir>/<run>/metrics.jsonl."""

    tensorboard: bool = False  # into <run_dir>/<run>/tensorboard
    wandb: bool = False  # needs `pip install -e '.[wandb]'`
    trackio: bool = False
    project: str = "sluice"  # for W&B and trackio; the run's name is the configuration's


CONVENTIONS: dict[str, dict[str, Any]] = {
    "decoupled_ppo": {},
    "grpo": {"aggregation": "sequence"},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    "dapo": {"clip_eps_high": 0.28},
    "gspo": {"aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "cispo": {"clip_eps": 1.0, "clip_eps_high": 4.0},
    "dpo": {},
}
"""What `policy.loss` sets by name, where the configuration doesn't; all else is the default of PolicyConfig."""


class PolicyConfig(Section, frozen=True, kw_only=True):
    """A policy loss on rewards, in addition to the teacher-forced losses; samples with an advantage take part."""

    enabled: bool = False  # trains on rewards
    loss: str = "decoupled_ppo"  # decoupled_ppo, grpo, dr_grpo, dapo, gspo, cispo, dpo, or your own: file.py:name
    aggregation: Literal["token", "sequence", "constant"] = "token"  # mean over tokens; of means; by a constant
    aggregation_tokens: int = 256  # per sequence, for aggregation constant; left out: sampling.max_new_tokens
    advantage: Literal["group_norm", "group_mean", "rloo", "reinforce_pp", "reward"] = "group_norm"  # see policy.md
    advantage_std: Literal["population", "sample"] = "population"  # divides by n or n - 1, in group_norm, reinforce_pp
    zero_variance: Literal["keep", "filter"] = "keep"  # groups with equal rewards: train, or drop and take others
    mask_truncated: bool = False  # sequences cut by their token limit: no token in the loss; their reward counts
    overlong_tokens: int | None = None  # sampled tokens; the reward falls by 1 over the last overlong_buffer before
    overlong_buffer: int = 0  # tokens; 0: by 1 at once, beyond overlong_tokens
    entropy_coef: float = 0.0  # times the mean entropy (nats) of the trained tokens, subtracted from the loss
    kl_coef: float = 0.0  # times the mean KL to kl_reference, added to the loss; scorers score the reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of that KL; see policy.md
    kl_reference: int | str = 0  # a weight version, which stays on disk (0: what the run started from), or a directory
    dpo_beta: float = 0.1  # of loss dpo: how far the weights may move from kl_reference; smaller is further
    mismatch: Literal["none", "truncate", "mask"] = "none"  # correction of engine versus trainer; see policy.md
    mismatch_cap: float = 2.0  # C: weights above it are cut; mask: tokens outside [1/C, C] are left out
    mismatch_level: Literal["token", "sequence"] = "token"  # sequence: the product over its tokens
    ce_weight: float = 0.0  # times the mean cross-entropy of right answers' sampled tokens, added to the loss
    clip_eps: float = 0.2  # the ratio is clipped to [1 - clip_eps, 1 + clip_eps_high]
    clip_eps_high: float | None = None  # None: clip_eps
    dual_clip: float | None = None  # > 1; None: off
    weight_cap: float = 5.0  # tokens with a behaviour importance weight above this are masked and counted
    weight_floor: float = 0.2  # tokens below this likewise
    max_token_staleness: int = 4  # versions; the largest current - version of a trained token
    on_stale: Literal["mask", "drop"] = "mask"  # mask the token, or drop its sample
    on_missing_proximal: Literal["mask", "behaviour", "drop"] = "mask"  # mask the token, take w = 1, or drop its sample
    on_reshaped: Literal["mask", "train"] = (
        "mask"  # tokens drawn under a caller's grammar, list or penalty; see policy.md
    )
    score_wait_s: float = 60.0  # how long the trainer waits for score jobs; unscored tokens are then `missing`

    @property
    def reference(self) -> int | None:
        """The version that the loss has scored beside its own, and that no retention deletes; None: none.

        REFERENCE_DIRECTORY for the weights of a directory.
        """
        if not self.enabled or not (self.kl_coef or self.by_pairs):
            return None
        return self.kl_reference if isinstance(self.kl_reference, int) else REFERENCE_DIRECTORY

    @property
    def by_pairs(self) -> bool:
        """Whether the loss compares two sequences of a group, and has none for each token."""
        return self.loss == "dpo"


class ScorerConfig(Section, frozen=True, kw_only=True):
    """Processes that score finished sequences under retained versions; they run only with a policy loss."""

    count: int = 1  # processes that `up` and `run` start on this host
    pass_tokens: int = 8192  # padded tokens per forward pass
    torch_threads: int = 1  # 0 = torch's own choice
    claim_gpu: bool = False  # lock a free GPU of the host; otherwise the scorer shares model.device
    lease_s: float = 30.0  # if a scorer is silent for this long, its open jobs go to another


class GatewayConfig(Section, frozen=True, kw_only=True):
    """`sluice gateway`: OpenAI-style completions over the decode queue."""

    count: int = 0  # gateways that `up` and `run` start on this host
    host: str = "127.0.0.1"  # where it listens; set a key before you leave loopback
    port: int = 8081  # of the first process; the others take the next ports
    names: tuple[str, ...] = ()  # host names allowed without a key, in addition to localhost and its own address
    model_name: str = "policy"  # in /v1/models; `default` always works
    max_requests: int = 512  # concurrent requests; more get 429
    request_timeout_s: float = 240.0  # keep it below the callers' timeout, so that they learn what the wait was for
    rollout_ttl_s: float = 3600.0  # a rollout without a call for this long is dropped, reason abandoned
    stream_tokens: int = 4  # tokens per streamed event
    tool_parser: str = "hermes"  # how the model writes tool calls: hermes, vllm:NAME, or package.module:function
    reasoning_parser: str = ""  # how it writes what it thinks: vllm:NAME; "": it is part of the text
    max_body_mb: float = 16  # per request


class RolloutServerConfig(Section, frozen=True, kw_only=True):
    """`sluice rollout-server`: the agent loop and its tools."""

    count: int = 0  # servers that `up` and `run` start on this host
    host: str = "127.0.0.1"  # where it listens; set a key before you leave loopback
    port: int = 9000  # of the first process; the others take the next ports
    names: tuple[str, ...] = ()  # host names allowed without a key, in addition to localhost and its own address
    tokenizers: dict[str, str] = {}  # callers' name → model directory or hub id; empty: policy → model.path
    tokenizer_cache_size: int = 5  # tokenizers in memory
    tokenizer_trust_remote_code: bool = False  # runs code of a listed tokenizer
    http_client_timeout_s: float = 300.0  # per call
    max_concurrent_rollouts: int = 100  # running at once; others wait in the queue
    max_waiting_rollouts: int = 400  # waiting in addition; more get 429
    deadline_s: float = 600.0  # per rollout, including callbacks
    keep_answers_s: float = 3600.0  # how long a repeated id gets its first answer
    keep_answers: int = 10_000  # the newest
    hosts: tuple[str, ...] = ()  # "host", "host:port" or "host:*" that requests may name, besides this file's
    tools: tuple[str, ...] = ("calculator",)  # calculator, or your own package.module:name
    environment: str | None = None  # your class with reset and step: file.py:name or package.module:name
    tool_latency_ms: tuple[int, int] = (10, 100)  # latency that the calculator simulates
    tool_timeout_s: float = 60.0  # per call
    max_tool_calls: int = 32  # calls per turn; the model is told which of its calls weren't run
    tool_threads: int = 8  # concurrent calls per plain function
    template_tools: bool = True  # the tools are given to the chat template
    template_drift: Literal["error", "warn"] = "error"  # warn: for trainers other than ours
    max_body_mb: float = 16  # per request


class RolloutConfig(Section, frozen=True, kw_only=True):
    """What `sluice produce` requests from a rollout server."""

    url: str | None = None  # the rollout server; None: prompts become decode jobs
    gateway_url: str | None = None  # where it calls back; None: this host's gateways, round-robin
    protocol: Literal["sync", "async", "polling"] = "sync"  # async: answered by callback; polling: Osmosis' SDK 0.3
    tokenizer_name: str = "policy"  # tokenizer for the server to use
    tool_server_url: str | None = None  # an MCP server with more tools
    max_concurrent: int = 64  # concurrent rollouts
    max_turns: int = 10  # advice to the server
    max_tokens_total: int = 8192  # advice to the server; context of one rollout
    timeout_s: float = 900.0  # per rollout, including the server's queue


class BrokerConfig(Section, frozen=True, kw_only=True):
    """`url` wins over the embedded broker; the variable REDIS_URL wins over `url`."""

    url: str | None = None  # redis://:password@host:6379/0; rediss:// for TLS
    embedded_dir: str = ".sluice/broker"  # where the embedded broker keeps its data
    socket_timeout_s: float = 10.0  # per answer
    connect_timeout_s: float = 5.0
    retry_for_s: float = 90.0  # an outage shorter than this stops no process
    sentinel_master: str | None = None  # set it, and `url` names the Sentinels: redis://:pw@host:26379,host2:26379/0
    allow_volatile: bool = False  # accept a broker without an append-only file; its restart loses what is in flight
    cluster: bool = False  # `url` names nodes of a Redis Cluster: redis://:pw@host:6379,host2:6379/0


class DataConfig(Section, frozen=True, kw_only=True):
    """The prompts: rows of `messages` with optional `truth` and `id`."""

    path: str = ""  # JSONL, Parquet, a saved data set, or hf:NAME[:CONFIG][:SPLIT]; --data of `run`
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"  # auto: from the path
    epochs: int = 1  # how often the rows are read
    limit: int | None = None  # rows per epoch
    on_malformed: Literal["stop", "skip"] = "stop"  # skip: counted, and the run continues


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out prompts, decoded by the workers and scored like rollouts, and never trained; see evaluation.md."""

    data: str = ""  # rows like those of data.path, others than these; empty: no evaluation
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"  # auto: from the path
    limit: int | None = None  # rows
    every: int = 10  # versions from one evaluation to the next; the first and the last version always have one
    n: int = 1  # answers per prompt
    k: tuple[int, ...] = (1,)  # pass@k for each of these, at most n
    temperature: float = 0.0  # 0 is greedy; all else that isn't named here is as in sampling
    top_p: float = 1.0
    max_new_tokens: int | None = None  # None: sampling.max_new_tokens
    pass_above: float = 0.0  # an answer passes if its reward is above this
    metric: str | None = None  # without eval/, higher is better; None: the first pass@k, else reward_mean, else f1
    keep_best: bool = True  # the version with the best metric stays on disk, whatever weights.retention is
    patience: int | None = None  # the run ends after this many evaluations that were no better than the best
    min_delta: float = 0.0  # an evaluation is better by more than this
    priority: int = 100  # of its jobs in the queue; those of the training rollouts have 0
    max_in_flight: int = 256  # sequences in the queue at once, beside producer.max_in_flight
    wait_s: float = 600.0  # without an answer for this long the evaluator ends; started again, it goes on
    keep_answers: int | None = 8  # newest evaluations whose answers stay in the run's directory; None = all


class ProducerConfig(Section, frozen=True, kw_only=True):
    """Admission: how far decoding may run ahead of training."""

    group_size: int = 1  # sequences per prompt
    max_in_flight: int = 512  # sequences from enqueue to the trainer's ack
    max_in_flight_mb: int = 1024  # what they hold in the broker, results, batches and dead letters included
    samples_per_version: int = 64  # the trainer's batch, in sequences
    max_staleness: int = 2  # versions; in a deterministic run the staleness of every step but the first few
    poll_s: float = 0.05  # admission's polling interval


class FleetRun(Section, frozen=True, kw_only=True):
    """One of the runs that a fleet's workers serve: {config, weight, priority, quota}."""

    config: str  # the run's YAML file, or its directory
    weight: float = 1.0  # of its share of the tokens, against runs of the same priority
    priority: int = 0  # its jobs go before those of runs with a lower one
    quota: int | None = None  # sequences that all workers together decode at once; null: any number


class WorkerConfig(Section, frozen=True, kw_only=True):
    """Decode workers; one process per engine."""

    count: int = 1  # processes that `up` and `run` start on this host
    backend: BackendName = "hf"  # hf: correctness first; vllm: fast
    fallback_backend: Literal["hf"] | None = None  # for jobs that `backend` can't decode; None: they fail
    vllm: VllmEngineOptions = VllmEngineOptions()
    logprobs_mode: Literal["raw", "processed"] = "raw"  # processed: at the sampling temperature; hf only
    lora: Literal["merged", "requests"] = "merged"  # of versions that are adapters; requests: kept beside the base
    adapters: dict[str, str] = {}  # name → directory of a LoRA adapter of model.path; callers choose one by `model`
    runs: tuple[FleetRun, ...] = ()  # that this engine serves instead of the file's own run: docs/fleet.md
    max_batch: int = 32  # sequences that one engine decodes at once
    lease_s: float = 15.0  # a worker that is silent for this long loses its jobs
    renew_s: float = 5.0  # at most half of lease_s
    stall_timeout_s: float = 120.0  # an engine without progress for this long loses its jobs
    max_attempts: int = 3  # worker deaths over a job that ran alone before it becomes a dead letter
    checkpoint_tokens: int = 256  # a running sequence is stored this often, and when it is handed back; 0 = never
    prefix_cache_mb: int = 256  # hf: keys and values (MiB) of ended turns, for those that go on from them; 0 = none
    prefix_wait_s: float = (
        0.5  # a turn waits at most this long for the worker that has the turns before; 0 = it doesn't
    )
    keep_result_s: float = 3600.0  # how long an ended job's id is kept, and arq's Job.result answers
    drain_s: float = 20.0  # time to finish after SIGTERM before jobs are handed back
    poll_s: float = 0.05  # between looks for jobs that wake no worker, twice that at work; of many idle ones, one looks
    torch_threads: int = 1  # 0 = torch's own choice
    claim_gpu: bool = True  # lock a free GPU of the host, or vllm.tensor_parallel_size of them, if it has GPUs

    @property
    def gpus(self) -> int:
        """Of one engine, where there are GPUs."""
        return self.vllm.tensor_parallel_size if self.backend == "vllm" else 1


class ConsumerConfig(Section, frozen=True, kw_only=True):
    """Parse, match and pack."""

    count: int = 1  # partitions of the result stream, one process each
    on_incomplete_group: Literal["train_partial", "drop"] = "drop"  # what to do with a group when a member died
    row_tokens: int = 1024  # token budget of a packed row
    max_sample_tokens: int = 32_768  # longer samples (prompt and target) are dropped, reason too_long
    poll_s: float = 0.05  # polling interval for results


class RepeatTerminateConfig(Section, frozen=True, kw_only=True):
    """Ends a looping sequence while it decodes; see the guard's contract."""

    enabled: bool = False  # a worker refuses to start if the guard doesn't fire
    min_new_tokens: int = 256  # no rule fires before this many tokens
    max_consecutive_token_repeats: int | None = 64  # the same token this often in a row; null: off
    ngram_size: int | None = 64  # tokens per block; null: off
    ngram_repeats: int = 2  # equal blocks in a row
    any_period: bool = False  # any period up to ngram_size, checked every 16 tokens; equal rows of a table count
    max_object_keys: int | None = None  # null: off
    object_key_prefix: str = '"object_'  # text that max_object_keys counts, however it is split into tokens


class RewardTerm(Section, frozen=True, kw_only=True):
    """One of several reward functions: {name, fn, weight}."""

    name: str  # in metrics, history and pages
    fn: str  # file.py:name or package.module:name
    weight: float = 1.0  # in the total


class RolloutMatchingConfig(Section, frozen=True, kw_only=True):
    """How the consumers process a rollout."""

    task: str = "detection"  # detection | exact_answer | reward, or your own name with the three import paths below
    reward: str | tuple[RewardTerm, ...] | None = None  # file.py:name of your function, or a list of {name, fn, weight}
    reward_timeout_s: float = 60.0  # per call of a reward function; then the sequence is dropped, reason reward_timeout
    reward_concurrency: int = 16  # concurrent calls per reward function, in each consumer
    parse: str | None = None  # "package.module:function"; None = the task's own
    match: str | None = None  # likewise
    target: str | None = None  # likewise
    grammar: Literal["object_n", "objects"] = "object_n"  # detection: {"object_1": {…}, …} or {"objects": [{…}, …]}
    matched_supervision: Literal["truth_labels", "geometry"] = "truth_labels"  # geometry: regress the boxes
    desc_ce_weight: float = 1.0  # weight of the cross-entropy on appended descriptions
    gt_only_fraction: float = 0.0  # share of sequences trained on the truth only
    match_top_k: int = 10  # truths with the highest IoU that a prediction may match; ties: the nearer centre
    iou_gate: float = 0.3  # pairs below it don't match
    fp_cost: float = 1.0  # cost of a prediction without a truth
    fn_cost: float = 1.0  # cost of a truth without a prediction
    max_objects: int = 256  # longer lists are cut and flagged
    max_text_chars: int = 200_000  # longer answers are cut before parsing
    repeat_terminate: RepeatTerminateConfig = RepeatTerminateConfig()


class FsdpConfig(Section, frozen=True, kw_only=True):
    """How the trainer's model is sharded over its ranks (PyTorch's FSDP2); not under `accelerate launch`."""

    mixed_precision: Literal["no", "bf16"] = "no"  # of the passes; weights, gradients and optimiser stay float32
    activation_checkpointing: bool = False  # keep no activations of a layer, and compute them again for its gradient
    cpu_offload: bool = False  # weights and optimiser are in the host's memory, and a layer's on the GPU while it runs


class LoraConfig(Section, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al., 2021): with a rank, they are all that is trained, checkpointed and published."""

    rank: int = 0  # of each adapter; 0: no adapters, all weights are trained
    alpha: float = 32.0  # an adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # of an adapter's input, in training
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"  # names or their ends

    @property
    def enabled(self) -> bool:
        return self.rank > 0


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The optimiser and its schedule; losses: teacher-forced here, policy in PolicyConfig."""

    external: bool = False  # your own training loop takes the batches; `up` and `run` start no trainer
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"  # muon: AdamW for all but the layers' matrices
    learning_rate: float = 1e-4  # after the warm-up
    warmup_steps: int = 0  # optimiser steps
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # after the warm-up
    schedule_steps: int | None = None  # optimiser steps above the floor, warm-up included; None: until max_versions
    min_learning_rate: float = 0.0  # the floor of the schedule
    weight_decay: float = 0.0  # decoupled from the gradient
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    freeze_vision: bool = True  # no gradient for the vision tower and its projector; false: all is trained
    dropout: bool = False  # keep the rates in the model's config.json; false: all are 0
    lora: LoraConfig = LoraConfig()
    micro_batch_tokens: int = 8192  # padded tokens per forward pass
    minibatches: int = 1  # optimiser steps per batch, on parts of it; all else that counts steps counts batches
    smooth_l1_weight: float = 1.0  # of box regression
    ciou_weight: float = 1.0  # of box regression
    publish_every: int = 1  # optimiser steps between two versions
    checkpoint_every: int = 1  # optimiser steps between two checkpoints; a kill undoes those since the last one
    async_checkpoints: bool = False  # write checkpoints beside the next steps, from a copy in the host's memory
    checkpoint_timeout_s: float = 1800.0  # a checkpoint beside the steps that isn't on disk by then ends the trainer
    keep_checkpoints: int = 2  # newest checkpoints to keep
    keep_rollouts: int | None = 0  # newest steps that keep samples in <run_dir>/<run>/rollouts; None = all
    max_versions: int | None = None  # stop after this version
    claim_gpu: bool = False  # lock a GPU, so that workers on this host leave it alone
    batch_wait_s: float = 600.0  # without a batch, a filtered group or a batch's images for this long the trainer ends
    torch_threads: int = 1  # 0 = torch's own choice
    ranks: int = 1  # processes that share one model, each with a GPU of its own if there are GPUs
    tensor_parallel: int = 1  # ranks that share each layer's matrices, as the model's plan says; 1, or all of them
    rank_timeout_s: float = 600.0  # a rank that doesn't answer the others for this long ends the trainer
    fsdp: FsdpConfig = FsdpConfig()


class WeightsConfig(Section, frozen=True, kw_only=True):
    """Published versions."""

    transport: Literal["directory", "store", "delta", "engine"] = (
        "directory"  # to the workers; docs/weights.md: when which
    )
    store_url: str | None = None  # of all but directory: s3://bucket/folder, gs://…, file:///…; null: in run_dir
    store_timeout_s: float = 60.0  # a transfer without progress is tried again for this long
    anchor_every: int = 10  # of delta: every so many versions one is whole; a late worker loads it and what followed
    cache_gb: float = 100.0  # of store and delta: most that a host keeps of versions; at least two have to fit
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of their files; auto: bfloat16 if engines compute in it
    publish_timeout_s: float = 600.0  # the trainer ends if a version isn't written by then
    cache_dir: str = ""  # on each host, for what it has fetched and verified; empty: sluice in ~/.cache
    retention: int = 4  # newest versions to keep on disk, beside policy.kl_reference; >= max_staleness + 2
    load_timeout_s: float = 600.0  # a worker that hasn't loaded a version by then ends, and its jobs go back
    tries: int = 8  # of a job whose pinned version a worker can't load, with growing pauses; then it is dead
    probe_tokens: int = 16  # length of the prompt that verifies a loaded version
    probe_tolerance: float = 1e-2  # nats per probe token between trainer and worker; ten times that in half precision
    second_copy_gb: float | None = None  # hf: for new weights beside the old; null: half of free memory; 0: none
    keep_cache: bool = False  # hf: running rows decode on over the cache of older weights; audited as unchecked
    max_pause_s: float | None = 1.0  # vllm: then some rows have tokens before others are prefilled; null: no bound


class PreflightConfig(Section, frozen=True, kw_only=True):
    """What is checked before anything starts: by `up`, `run`, `doctor`, `--dry-run`, and by a role of what it reads."""

    max_s: float = 10.0  # for reading all rows of data.path; later ones are reported as unscanned; 0 = use none


class UpConfig(Section, frozen=True, kw_only=True):
    """The supervisor of `sluice up` and `sluice run`."""

    restart_backoff_s: float = 0.5  # before the first restart; doubles with each failure in a row
    restart_backoff_max_s: float = 30.0
    max_restarts: int = 20  # of one process in a row, then the run fails; a poison job may cost 10
    restart_window_s: float = 300.0  # a process that stays up for longer is healthy: its count begins anew
    stop_grace_s: float = 30.0  # from SIGTERM to SIGKILL


class Config(Section, frozen=True, kw_only=True):
    """One run."""

    run: str = "default"  # prefix of its Redis keys, and its directory
    seed: int = 0  # sampling seed; each sequence derives its own from it, its job and its index
    deterministic: bool = False  # equal bits whatever is killed; on CPU, one row at a time (see failures.md)
    run_dir: str = ".sluice/runs"  # the run's files go to <run_dir>/<run>
    broker: BrokerConfig = BrokerConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
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
    tracing: TracingConfig = TracingConfig()
    dashboard: DashboardConfig = DashboardConfig()
    tracking: TrackingConfig = TrackingConfig()
    preflight: PreflightConfig = PreflightConfig()
    up: UpConfig = UpConfig()
    custom: dict[str, Any] = {}  # free; custom.extra.rollout_matching is read as rollout_matching
