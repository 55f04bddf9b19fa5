"""`sluice bench NAME --json`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

app = App(
    name="bench",
    help="Measure queue, engines, pipeline, guard, weights, rollouts, images, training, kills; progress on stderr.",
)

AsJson = Annotated[bool, Parameter(negative="", help="One JSON object on stdout instead of text.")]
Quick = Annotated[
    bool, Parameter(negative="", help="Takes seconds instead of minutes; a smoke test, not a measurement.")
]
Rounds = Annotated[int | None, Parameter(help="Rounds of alternating sides; the default depends on the part.")]
Counts = Annotated[tuple[int, ...], Parameter(help="Sequences at once; may be repeated.")]
Workers = Annotated[tuple[int, ...], Parameter(help="Worker processes per measurement; may be repeated.")]
RolloutPart = Literal["added", "rollouts", "turns", "served"]
Vllm = Annotated[bool, Parameter(help="Measure vLLM too.")]


@app.command
def pipeline(
    *,
    json: AsJson = False,
    sequences: Annotated[int, Parameter(help="Sequences per round.")] = 512,
    workers: Annotated[int, Parameter(help="Decode workers, and the same number of bare engines.")] = 2,
    model: Annotated[Path | None, Parameter(help="Model directory; a tiny random one by default.")] = None,
    rounds: Annotated[int, Parameter(help="Rounds of alternating sides.")] = 5,
    max_batch: Annotated[int, Parameter(help="Sequences an engine decodes at once.")] = 32,
) -> None:
    """Queue, workers, result stream and a null sink against the bare engine, in one run.

    Both sides decode the same prompts with the same sampling and seeds, with as many processes, loaded and warm, in
    alternating rounds; efficiency is the median of the rounds' ratios. Without --model, a tiny random Qwen3 of the
    demo's size is created in .sluice/bench. Then latency, from enqueue to result, at half load.

    Example: `sluice bench pipeline --workers 2 --json`
    """
    _run("pipeline", locals())


@app.command
def queue(
    *,
    json: AsJson = False,
    workers: Workers = (1, 2, 4, 8),
    jobs: Annotated[int | None, Parameter(help="Jobs per round of our queue.")] = None,
    quick: Quick = False,
) -> None:
    """No-op jobs per second of our queue with 1 to 8 worker processes, against stock arq and SAQ, in one run.

    Ours runs on a broker with AOF everysec; arq (its defaults, and the best of a small grid) and SAQ run on the same
    broker program without AOF. Then enqueue to start on an idle queue, bulk enqueue, commits by size, claims by queue
    length, and what two SIGKILLs cost 64 jobs of one second each. About 6 minutes.

    Example: `sluice bench queue --workers 2 --workers 8 --json`
    """
    _run("queue.measure", locals())


@app.command
def engine(
    *,
    json: AsJson = False,
    counts: Counts = (32, 128),
    rounds: Rounds = None,
    longest: Annotated[int, Parameter(help="Tokens of the longest sequence.")] = 512,
    threads: Annotated[int, Parameter(help="Threads for torch, the same for every engine.")] = 1,
    vllm: Vllm = True,
    quick: Quick = False,
) -> None:
    """Our decode loop against transformers' `generate` and continuous batching, and our vLLM backend against vLLM.

    Each engine has its own process, and one runs at a time, on the same float32 model and the same greedy sequences of
    8 to 512 new tokens, all at once. Only useful tokens count, and they must be the same on every engine. Rounds
    alternate, and a ratio is the median of the rounds' ratios. By default 3 rounds of 32 sequences and 1 of 128, about
    6 minutes; --rounds applies to every count. --quick runs one round of at most 64 tokens a sequence.

    Example: `sluice bench engine --counts 32 --no-vllm --json`
    """
    _run("engine", locals())


@app.command
def guard(
    *,
    json: AsJson = False,
    counts: Counts = (1, 64, 256),
    sequences: Annotated[int, Parameter(help="Sequences to count tail tokens of; half of them loop.")] = 192,
    longest: Annotated[int, Parameter(help="Maximum new tokens of a looping sequence.")] = 2048,
    run_sequences: Annotated[int, Parameter(help="Sequences of each of the two whole runs; 0 skips them.")] = 128,
    vllm: Vllm = True,
    quick: Quick = False,
) -> None:
    """The repeat guard with its default thresholds: its share of a step, its cost per token, and what it saves.

    Guard time over step time inside the engine's process, for --counts sequences, on both backends; the rule alone
    against a naive re-scan and vLLM's own check; tail tokens saved over --sequences, half of which loop, against an
    oracle, without and with `any_period`; and two whole runs of --run-sequences, without the guard and with it. About 5
    minutes, with --quick one. In the runs a sequence has at most 1024 new tokens, regardless of --longest.

    Example: `sluice bench guard --no-vllm --json`
    """
    _run("guard.measure", locals())


@app.command
def proximal(
    *,
    json: AsJson = False,
    backends: Annotated[str, Parameter(help="Engines, separated by commas.")] = "hf,vllm",
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Weight updates while sequences run: what they cost, and how many older tokens get a valid proximal logprob.

    From publish to the first token under the new version, with a broker and a decode worker; an update that scores
    against one that only re-prefills, and against none; tokens per second at one update per 50, 200 and 1000 steps, and
    their share of the rate without updates; the share of older tokens with a valid proximal logprob behind a queue of
    1 to 4 versions, with a scorer process. About 8 minutes. --rounds applies to the cost of scores.

    Example: `sluice bench proximal --backends hf --json`
    """
    _run("proximal.measure", locals())


@app.command
def rollout(
    *,
    json: AsJson = False,
    only: Annotated[tuple[RolloutPart, ...] | None, Parameter(help="Parts; may be repeated. All by default.")] = None,
    rounds: Rounds = None,
    vllm: Vllm = True,
    quick: Quick = False,
) -> None:
    """Agent rollouts through rollout server, gateway and worker, and the gateway against vLLM's own server.

    added: what the gateway adds to one engine call on an idle queue. rollouts: 100 at once, 3 turns each, with tools
    that take 10 to 100 ms, against the same turns on the bare engine. turns: conversations with and without prefixes
    kept by the workers. served: requests to a vLLM worker behind the gateway against the same requests to vLLM's OpenAI
    server. The sides alternate. About 8 minutes on two idle cores. --rounds applies to all parts but the first.

    Example: `sluice bench rollout --only added --json`
    """
    _run("rollout", locals())


@app.command
def images(
    *,
    json: AsJson = False,
    scenes: Annotated[int, Parameter(help="Pictures.")] = 64,
    group: Annotated[int, Parameter(help="Sequences of each picture.")] = 4,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Pictures from the file to the gradient: where the time goes, how often each is processed, the memory of many.

    The share of fetch, decode, processor, vision tower, prefill, decoding and training, each timed alone, for groups of
    sequences of the demo's scenes; how often a worker and a trainer process each picture, and how often the vision
    tower runs for it; the peak memory of a worker with 1,000 pictures in its queue, beside 10. About 4 minutes.
    --rounds applies to the stages.

    Example: `sluice bench images --json`
    """
    _run("images", locals())


@app.command
def train(
    *,
    json: AsJson = False,
    tokens: Annotated[int, Parameter(help="Tokens of a row.")] = 8192,
    vocabulary: Annotated[int, Parameter(help="Words of the model.")] = 151_936,
    threads: Annotated[int, Parameter(help="Threads for torch, the same for every side.")] = 2,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """A training step with a large vocabulary: peak memory and tokens per second, beside plain passes and TRL.

    Each side trains a random Qwen3 of some 40 million parameters on the same rows with a clipped policy loss, in a
    process of its own; the optimiser is left out. Plain passes make all logits of a row at once: with the defaults
    they need some 16 GB of memory. Then come steps with a KL to a reference and of DPO, and a scorer's pass, each
    over a plain step (`terms`), and gradients on several ranks against one process. About 15 minutes.

    Example: `sluice bench train --tokens 1024 --json`
    """
    _run("train", locals())


@app.command
def crash(
    *,
    json: AsJson = False,
    kills: Annotated[int, Parameter(help="SIGKILLs, over all roles and the broker.")] = 50,
    steps: Annotated[int | None, Parameter(help="Optimiser steps of each run.")] = None,
    seed: Annotated[int, Parameter(help="Of the run, and of the order of the kills.")] = 0,
    quick: Quick = False,
) -> None:
    """A deterministic run whose processes are killed against one that is left alone: whether one bit differs.

    Two whole runs of a tiny model with a policy loss and their own brokers. In one, producer, workers, consumer,
    scorer, trainer and broker are killed in turn, every other trainer between a published version and its checkpoint.
    Then ids and tokens in the order of training, versions, behaviour and proximal logprobs, losses and the last weights
    are compared, bit by bit. Under half an hour on two busy cores.

    Example: `sluice bench crash --json`
    """
    _run("crash", locals())


@app.command
def operate(
    *,
    json: AsJson = False,
    sequences: Annotated[int | None, Parameter(help="Finished sequences in the history.")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """The dashboard's pages with a long history, `sluice --help`, and what metrics cost the pipeline.

    Every page of a dashboard process 40 times, with --sequences finished ones in the history (100,000) and 512 jobs and
    dead letters in the broker; starts of `sluice --help`; --rounds of a pipeline with metrics scraped every second
    against one without metrics, alternating. About 5 minutes.

    Example: `sluice bench operate --json`
    """
    _run("operate", locals())


@app.command
def scale(
    *,
    json: AsJson = False,
    count: Annotated[int, Parameter(help="Jobs in the queue, and sequences of the run; at least 1000.")] = 1_000_000,
    workers: Annotated[int, Parameter(help="Simulated workers that lease, and that idle.")] = 100,
    idle_s: Annotated[float, Parameter(help="Seconds to watch the idle workers.")] = 20.0,
    tokens: Annotated[int, Parameter(help="Tokens of an answer.")] = 2,
    max_batch: Annotated[int, Parameter(help="Of the worker; 1: no two sequences share a claim or a commit.")] = 256,
    policy: Annotated[bool, Parameter(negative="", help="Batches bear the sampled tokens, not the truth.")] = False,
) -> None:
    """A million queued jobs, a million sequences in one run, a hundred idle workers: which costs stay flat.

    Bytes per queued job with credit lifted; then one continuous run through producer, consumer, history and the
    trainer's session, with an engine that only answers and a trainer that only acks: time per sequence at three marks,
    memory of every role and of the broker, commands and bytes that each role exchanges with it; and the broker's share
    of a core while many workers wait. About half an hour on two cores; --count 10000 takes half a minute and puts the
    marks at 100, 1,000 and 10,000.

    Example: `sluice bench scale --count 100000 --json`
    """
    _run("scale", locals())


@app.command
def truth(
    names: Annotated[tuple[str, ...], Parameter(help="Architectures; all of the matrix by default.")] = (),
    /,
    *,
    json: AsJson = False,
    table: Annotated[bool, Parameter(negative="", help="Print the table of docs/engine.md instead.")] = False,
    quick: Quick = False,
) -> None:
    """Every number of every architecture in the matrix against transformers' own passes: how many tokens are wrong.

    A tiny model of each decodes greedily, one row alone and in a batch that rows join and leave, beyond its window,
    and is compared with `generate` and its own cache, and with plain passes. Then random sequences are scored in the
    trainer's rows and compared with plain passes. A token is wrong if its logprob is off by more than 1e-4 nats in
    float32, or if a greedy token differs where the two best are further apart. About 3 minutes.

    Example: `sluice bench truth Gemma3 Qwen3.5 --json`
    """
    from sluice.bench.harness import finish
    from sluice.bench.truth import check

    found = check.measure(names, quick=quick)
    if table:
        print(check.table(found["architectures"]))
    else:
        finish(found, as_json=json)


@app.command
def fleet(
    *,
    json: AsJson = False,
    runs: Annotated[int, Parameter(help="Runs that share the workers.")] = 20,
    workers: Annotated[int, Parameter(help="Worker processes; each serves all runs.")] = 1,
    seconds: Annotated[float, Parameter(help="Measured in each round, after as many that warm up.")] = 20.0,
    rounds: Annotated[int, Parameter(help="Rounds of alternating sides.")] = 3,
    quick: Quick = False,
) -> None:
    """How fairly workers that serve many runs (`worker.runs`) divide their tokens, and what serving many costs.

    Runs of weight 1, 2 or 4 whose jobs have 8 to 64 tokens and 1 to 4 sequences: every other one always has jobs, the
    rest ask for 20 to 80 % of their share. `jain` is Jain's index of what each got, over what weighted max-min fairness
    gives it. `rate_share` is their tokens/s over those of usual workers of one run, in turns. About 6 minutes.

    Example: `sluice bench fleet --runs 20 --workers 2 --json`
    """
    _run("fleet", locals())


@app.command
def weights(
    *,
    json: AsJson = False,
    layers: Annotated[int, Parameter(help="Of a random Qwen3; 28 of 1024 with the whole vocabulary: 0.6 B.")] = 28,
    hidden: Annotated[int, Parameter(help="Its width.")] = 1024,
    vocab: Annotated[int, Parameter(help="Its tokens.")] = 151_936,
    steps: Annotated[int, Parameter(help="Versions whose deltas are weighed.")] = 10,
    rounds: Annotated[int, Parameter(help="Versions that travel by each carrier.")] = 3,
    beside: Annotated[int, Parameter(help="Versions while the trainer goes on and sequences run.")] = 3,
    rows: Annotated[int, Parameter(help="Sequences that run then.")] = 8,
    threads: Annotated[int, Parameter(help="Threads for torch, of the trainer and of the engine.")] = 2,
    backends: Annotated[str, Parameter(help="Which, separated by commas.")] = "hf,vllm",
    quick: Quick = False,
) -> None:
    """What a version weighs by carrier, and how long it takes from the optimiser's step to an engine.

    Ten Adam steps at 1e-6 on real losses, then versions in bfloat16, which a worker on a queue takes one after the
    other: vs_copy is the time from the optimiser's step to a version that is swapped in and proven, over a plain copy
    of the same bytes by the same way, in turns. Then the same while training goes on and sequences run:
    to_first_token_s in parts, publish_s, and stall_s and step_slowdown_s of the trainer. Links of 100, 500 and 2000
    Mbit/s are held by sleeping. 0.5 B parameters need 20 GiB of memory and 15 GB of disk.

    Example: `sluice bench weights --layers 8 --backends hf --json`
    """
    _run("weights.measure", locals())


@app.command
def elastic(
    *,
    json: AsJson = False,
    workers: Annotated[int, Parameter(help="Decode workers.")] = 2,
    rounds: Rounds = None,
    life_s: Annotated[float | None, Parameter(help="Seconds after which each worker is replaced; 60.")] = None,
    window_s: Annotated[float | None, Parameter(help="Seconds of a window; 120.")] = None,
    vllm: Vllm = True,
    quick: Quick = False,
) -> None:
    """Workers that are replaced all the time: the rate that is left, what is decoded again, and how long one starts.

    Windows in turns, with the workers left alone and with each replaced every --life-s seconds: the new one starts
    first, then the oldest gets SIGTERM, or in one of three cases SIGKILL. A queue that never empties, and each job has
    to arrive once. The start of a worker is reported in parts, beside the others and alone. --rounds (2) counts pairs
    of windows. About 10 minutes.

    Example: `sluice bench elastic --no-vllm --json`
    """
    _run("elastic", locals())


@app.command(name="all")
def every(
    *,
    json: AsJson = False,
    only: Annotated[tuple[str, ...], Parameter(help="Benchmarks; may be repeated. All by default.")] = (),
    rounds: Annotated[int, Parameter(help="How often each is run; 1 shows no spread of its own.")] = 3,
    compare: Annotated[Path | None, Parameter(help="A stored run: the file of an earlier --out.")] = None,
    out: Annotated[Path | None, Parameter(help="A file for the JSON object, which --compare takes.")] = None,
    any_machine: Annotated[bool, Parameter(negative="", help="Compare with another machine's run too.")] = False,
) -> int:
    """Every benchmark at a small size, and what moved beyond its spread against a stored run of this machine.

    A guard, not a measurement: sizes are small. `value` is the median of the rounds, `spread` the distance of the
    farthest one, or a share of the value if that is more; a figure moved if the two ranges don't meet. A benchmark that
    fails is named, and the others still run. Exits with 1 if a figure moved or a benchmark failed. About half an hour a
    round on two cores.

    Example: `sluice bench all --json --compare base.json --out tonight.json`
    """
    from sluice.bench import regression
    from sluice.bench.harness import finish
    from sluice.pipeline.errors import ConfigError

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.parent}")
    found = regression.measure(only, rounds, compare, any_machine=any_machine)
    finish(found, as_json=json, out=out)
    return int(bool(found["moved"] or found["failed"]))


def _run(bench: str, options: dict[str, Any]) -> None:
    """Measure what these options plan; a benchmark is imported when it runs."""
    from sluice.bench.harness import finish, run

    module, as_json = import_module(f"sluice.bench.{bench}"), options.pop("json")
    finish(run(module.measure, module.Plan.of(**options)), as_json=as_json)
