"""Models as OpenAI's API lists them."""

from typing import Any

from penstock.gateway.models.names import Named


def entry(name: str, named: Named, max_model_len: int | None) -> dict[str, Any]:
    """One name: an alias says what it is the alias of (`root`), an adapter the model that it adapts (`parent`).

    Args:
        name: What clients put in `model`.
        named: What it stands for.
        max_model_len: Tokens of prompt and output together; None where that is not known yet.
    """
    shown: dict[str, Any] = {"id": name, "object": "model", "created": int(named.created), "owned_by": "penstock"}
    shown["root"] = named.name
    shown["parent"] = named.model.name if named.adapter is not None else None
    if max_model_len is not None:
        shown["max_model_len"] = max_model_len
    return shown
