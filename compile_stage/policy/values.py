"""What values of the policy language may be, and what all its sections are made with (`policy.schema`)."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

# Those that we ship lowerings for. A plug-in may bring others, so which ones a policy may name is asked of the plug-ins
# that are installed: `checks` does, and the JSON Schema lists what lowerings bring.
SHIPPED_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4", "fp8")
Precision: TypeAlias = Annotated[str, WithJsonSchema({"enum": list(SHIPPED_PRECISIONS), "type": "string"})]
Device: TypeAlias = Literal["cpu", "cuda", "rocm", "vulkan", "apple", "android", "browser"]
HardwareField: TypeAlias = Literal[
    "fingerprint", "system", "machine", "cpu", "features", "without", "cores", "accelerators"
]

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](-?[A-Za-z0-9_])*$", max_length=64)]
# What MLflow takes as the key of a tag.
TAG_KEY = r"^[A-Za-z0-9_./ :-]+$"
TagKey: TypeAlias = Annotated[str, StringConstraints(pattern=TAG_KEY, max_length=250)]
CURRENCY = r"^[A-Z]{3}$"
MAX_COUNT = 2**31 - 1  # runtimes count in 32 bits
MAX_ROWS = 1_048_576  # of one call: its rows are listed and its answers held, and more rows are served in parts anyway
MAX_TOKENS = 2**20  # of a window, which the original model computes as a whole
MAX_MEMORY_MB = 1e9  # more than any machine has: the kernel takes no limit beyond 64 bits
MAX_SEED = 2**53 - 1  # what every reader of JSON holds exactly
Size: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
RowCount: TypeAlias = Annotated[int, Field(ge=1, le=MAX_ROWS)]
# More than any machine's cores: a runtime that is asked for more starts them, and never ends. Servers and clients too.
MAX_THREADS = 1024
Threads: TypeAlias = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Shape: TypeAlias = Annotated[list[Size], Field(min_length=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Distance: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ShareLoss: TypeAlias = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cosine: TypeAlias = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Decibel: TypeAlias = Annotated[float, Field(ge=-200, le=400, allow_inf_nan=False)]
Confidence: TypeAlias = Annotated[float, Field(gt=0.5, lt=1)]

_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
FUNCTION_METRIC = rf"^python:{_FUNCTION}$"
SOURCE = rf"^(input_example|synthetic|file:[^\x00]+\.(npz|parquet|csv)|mlflow-dataset:.+|python:{_FUNCTION})$"

# Tags of the alternatives of a union; the message writer takes them out of an error's path.
AS_NUMBER, AS_MAP, AS_WORD, AS_LIST = "<number>", "<map>", "<word>", "<list>"


def number_or_map(value: Any) -> str:
    """The tag of a limit that may be written as a number alone."""
    return AS_MAP if isinstance(value, dict) else AS_NUMBER


def word_or_list(value: Any) -> str:
    """The tag of a value that is `auto` or a list."""
    return AS_LIST if isinstance(value, list) else AS_WORD


def date_from_text(value: Any) -> Any:
    """A quoted date is as good as YAML's own."""
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            return value
    return value


def text_from_count(value: Any) -> Any:
    """`cores: 8` is the text that the machine's own count is compared with."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


HardwareWords: TypeAlias = Annotated[Text, BeforeValidator(text_from_count, json_schema_input_type=str | int)]


class Section(BaseModel):
    """Strict: an unknown key is an error, and nothing is converted silently."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, defer_build=True, use_attribute_docstrings=False
    )
