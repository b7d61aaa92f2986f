"""Parts of a model that stay as `transformers` has them, although there are faster ones: REGROW_STOCK names
them, separated by commas."""

import os
from typing import Literal, get_args

from regrow.errors import BadConfig

Part = Literal["indexer", "experts"]


def left_stock(part: Part) -> bool:
    """Return whether `part` is to be left alone. Raises BadConfig for a name that is no part."""
    named = [name.strip() for name in os.environ.get("REGROW_STOCK", "").split(",") if name.strip()]
    for name in named:
        if name not in get_args(Part):
            raise BadConfig(f"REGROW_STOCK: {name!r} is none of {', '.join(get_args(Part))}")
    return part in named
