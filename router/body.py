"""The base of all request bodies and the objects inside them: strict types, null is absent, unknown fields ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """Base of all bodies and the objects inside them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data
