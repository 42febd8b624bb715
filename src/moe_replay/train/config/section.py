"""What all sections of a configuration have in common."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("must be a number")
    return value


Limit = Annotated[float, AllowInfNan(), AfterValidator(_not_nan)]
"""A number above which something happens; infinity: never."""


class Section(BaseModel):
    """A table of the configuration: immutable, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
