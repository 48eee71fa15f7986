"""The base of every section of a recipe, and the kinds of values that recur."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


CompileMode = Literal["default", "reduce-overhead", "max-autotune", "aot_eager"]


class Section(BaseModel):
    """Base of all sections: unknown keys, wrong types, NaN and later changes are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
