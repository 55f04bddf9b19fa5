"""Bounds and names that several schemas share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field

Role = Literal["system", "user", "assistant", "tool", "function"]
VALID_MESSAGE_ROLES: tuple[str, ...] = get_args(Role)

MAX_ID_LENGTH = 256
MAX_NAME_LENGTH = 256
MAX_TOKENS_LIMIT = 32_768  # of one reply
MAX_TOTAL_TOKENS_LIMIT = 1_000_000  # of one context
MAX_TURNS_LIMIT = 100
MAX_METADATA_BYTES = 1024 * 1024


class _StopAtFirst(FailFast):
    """One that may stand in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


STOP = _StopAtFirst()
"""Of a list: the first item that is wrong is the answer. A million complaints cost more than a million items."""

JsonObject = dict[str, Any]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Schema(BaseModel):
    """Types as written (no "1" for 1), finite numbers only."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class OpenSchema(Schema):
    """Keeps the fields that it does not know."""

    model_config = ConfigDict(extra="allow")
