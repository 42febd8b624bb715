"""`Section`: a table of settings, and the types of numbers in it."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("must be a number")
    return value


def _fits_64_bits(value: Any) -> Any:
    """Reject integers beyond 64 bits: TOML has none, so a recipe with one could not be read back."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must fit into 64 bits")
    return value


Limit = Annotated[float, AllowInfNan(), AfterValidator(_not_nan)]
"""A threshold; infinity disables it."""
Setting = Annotated[int | Annotated[float, AllowInfNan()] | bool | str, BeforeValidator(_fits_64_bits)]


class Section(BaseModel):
    """A table of the configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `steps = true`, which pydantic reads as 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        has_boolean = any(isinstance(item, bool) for item in (value if isinstance(value, (list, tuple)) else [value]))
        if has_boolean and "bool" not in str(annotation):
            raise ValueError("should be a number or text, not true or false")
        return value
