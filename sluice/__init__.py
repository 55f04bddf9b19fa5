"""Sluice: a queue-driven rollout pipeline for post-training language models.

What a program of yours needs is here, imported when it is first asked for:

    from sluice import Rollouts                               your own trainer: batches that are trained exactly once
    from sluice import Task, TaskContext, Parsed, Matched     your own task: parse, match, target
    from sluice import tool, ToolError                        your own tools for agents
    from sluice import GenerationEngine, GenerationOptions    decoding offline, both engines
    from sluice import DecodeJob, JobQueue, load_config       your own producer

    sluice.producers ──jobs──▶ sluice.workers ──results──▶ sluice.consumers      sluice.pipeline: what they share
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.consumers.tasks.task import Matched as Matched
    from sluice.consumers.tasks.task import Parsed as Parsed
    from sluice.consumers.tasks.task import Task as Task
    from sluice.consumers.tasks.task import TaskContext as TaskContext
    from sluice.consumers.training.handoff import Batch as Batch
    from sluice.consumers.training.handoff import RolloutDataset as RolloutDataset
    from sluice.consumers.training.handoff import Rollouts as Rollouts
    from sluice.pipeline.config.load import load_config as load_config
    from sluice.pipeline.config.types import Config as Config
    from sluice.pipeline.config.types import VllmEngineOptions as VllmEngineOptions
    from sluice.pipeline.config.types import VlmPreprocessOptions as VlmPreprocessOptions
    from sluice.pipeline.errors import ConfigError as ConfigError
    from sluice.pipeline.errors import SluiceError as SluiceError
    from sluice.pipeline.queue import Credit as Credit
    from sluice.pipeline.queue import JobQueue as JobQueue
    from sluice.pipeline.queue import job_id_for as job_id_for
    from sluice.pipeline.queue.replies import Replies as Replies
    from sluice.pipeline.wire.keys import Keys as Keys
    from sluice.pipeline.wire.messages import DeadLetter as DeadLetter
    from sluice.pipeline.wire.messages import DecodeJob as DecodeJob
    from sluice.pipeline.wire.messages import GeometryTarget as GeometryTarget
    from sluice.pipeline.wire.messages import ImageRef as ImageRef
    from sluice.pipeline.wire.messages import Progress as Progress
    from sluice.pipeline.wire.messages import RolloutHead as RolloutHead
    from sluice.pipeline.wire.messages import SamplingParams as SamplingParams
    from sluice.pipeline.wire.messages import ScoreJob as ScoreJob
    from sluice.pipeline.wire.messages import ScoreResult as ScoreResult
    from sluice.pipeline.wire.messages import SequenceResult as SequenceResult
    from sluice.pipeline.wire.messages import TokenDelta as TokenDelta
    from sluice.pipeline.wire.messages import TrainingBatch as TrainingBatch
    from sluice.pipeline.wire.messages import TrainingSample as TrainingSample
    from sluice.pipeline.wire.messages import Turn as Turn
    from sluice.pipeline.wire.messages import WeightVersion as WeightVersion
    from sluice.producers.agents.tools import Rollout as Rollout
    from sluice.producers.agents.tools import Tool as Tool
    from sluice.producers.agents.tools import ToolError as ToolError
    from sluice.producers.agents.tools import ToolImage as ToolImage
    from sluice.producers.agents.tools import tool as tool
    from sluice.workers.engine.generation_engine import GenerationEngine as GenerationEngine
    from sluice.workers.engine.plugins import BalancedJsonStop as BalancedJsonStop
    from sluice.workers.engine.plugins import DuplicateObjectSuppression as DuplicateObjectSuppression
    from sluice.workers.engine.plugins import GenerationPlugin as GenerationPlugin
    from sluice.workers.engine.requests import GenerationOptions as GenerationOptions
    from sluice.workers.engine.requests import GenerationResult as GenerationResult
    from sluice.workers.engine.requests import ModelLoadConfig as ModelLoadConfig
    from sluice.workers.engine.requests import TextGenerationRequest as TextGenerationRequest
    from sluice.workers.engine.requests import VlmGenerationRequest as VlmGenerationRequest

__version__ = "0.1.0"

# Module to names; the imports above say the same to type checkers, and a test that both agree.
_HOMES = {
    "sluice.consumers.training.handoff": ("Batch", "RolloutDataset", "Rollouts"),
    "sluice.consumers.tasks.task": ("Matched", "Parsed", "Task", "TaskContext"),
    "sluice.pipeline.config.load": ("load_config",),
    "sluice.pipeline.config.types": ("Config", "VllmEngineOptions", "VlmPreprocessOptions"),
    "sluice.pipeline.errors": ("ConfigError", "SluiceError"),
    "sluice.pipeline.queue": ("Credit", "JobQueue", "job_id_for"),
    "sluice.pipeline.wire.keys": ("Keys",),
    "sluice.pipeline.wire.messages": (
        "DeadLetter", "DecodeJob", "GeometryTarget", "ImageRef", "Progress", "RolloutHead", "SamplingParams",
        "ScoreJob", "ScoreResult", "SequenceResult", "TokenDelta", "TrainingBatch", "TrainingSample", "Turn",
        "WeightVersion",
    ),
    "sluice.pipeline.queue.replies": ("Replies",),
    "sluice.producers.agents.tools": ("Rollout", "Tool", "ToolError", "ToolImage", "tool"),
    "sluice.workers.engine.generation_engine": ("GenerationEngine",),
    "sluice.workers.engine.plugins": ("BalancedJsonStop", "DuplicateObjectSuppression", "GenerationPlugin"),
    "sluice.workers.engine.requests": (
        "GenerationOptions", "GenerationResult", "ModelLoadConfig", "TextGenerationRequest", "VlmGenerationRequest",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
