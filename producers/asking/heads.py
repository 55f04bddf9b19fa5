"""What a row becomes: one RolloutHead for each member of its group, with the request that is posted for it.

The request is stored with the open rollout so that a restart can post it again; addresses and keys are no part of it.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.types import Config
from pipeline.errors import DataError
from pipeline.queue import rollout_group_for
from pipeline.queue.rollouts import RolloutHead
from producers.sources import Row, identity


def heads_of(config: Config, row: Row, epoch: int) -> list[RolloutHead]:
    """The members of a row's group, in index order. Raises DataError for a row with images."""
    name, n = identity(row), config.producer.group_size
    if row.images:
        raise DataError(
            f"row {name[:80]}: the rollout protocol carries no images; leave them out, or unset rollout.url"
        )
    group = rollout_group_for(config.run, name, epoch, config.sampling, n)
    metadata = {**row.metadata, "row": name[:256], "epoch": epoch}
    return [
        RolloutHead(
            rollout_id=f"{group}:{index}",
            group_id=group,
            group_size=n,
            index=index,
            task=config.rollout_matching.task,
            truth=row.truth,
            metadata=metadata,
            request=_request(config, f"{group}:{index}", row, metadata),
        )
        for index in range(n)
    ]


def _request(config: Config, rollout_id: str, row: Row, metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of the protocol's RolloutRequest, but for `server_url` and `callback_api_key`."""
    sampling, rollout = config.sampling, config.rollout
    return {
        "rollout_id": rollout_id,
        "messages": row.messages,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop) or None,
            "logprobs": True,
        },
        "tokenizer_name": rollout.tokenizer_name,
        "tool_server_url": rollout.tool_server_url,
        "max_turns": rollout.max_turns,
        "max_tokens_total": rollout.max_tokens_total,
        "metadata": metadata,
    }
