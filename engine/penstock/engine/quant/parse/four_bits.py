"""`quant_method: awq` and `gptq`: whole numbers of four bits, of GPTQ also eight, packed into words; `mxfp4` of gpt-oss."""

from collections.abc import Mapping
from typing import Any

from penstock.engine.quant.parse.fields import choice, group_size, names, refuse
from penstock.engine.quant.scheme import CheckpointQuantization, Rule, WeightScheme


def parse_awq(raw: Mapping[str, Any]) -> CheckpointQuantization:
    """Returns what AutoAWQ's configuration says; ConfigError names the field that cannot be served."""
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse("version", f"is {raw['version']!r}; another order of packed numbers than gemm's is not supported")
    scheme = WeightScheme(
        form="awq",
        bits=choice(raw, "bits", (4,)),
        group=group_size(raw),
        symmetric=not choice(raw, "zero_point", (True, False), True),
        scale="scales",
    )
    ignore = names(raw, "modules_to_not_convert")
    return CheckpointQuantization(method="awq", rules=(Rule(("Linear",), scheme),), ignore=ignore, ignore_anywhere=True)


def parse_gptq(raw: Mapping[str, Any]) -> CheckpointQuantization:
    """Returns what AutoGPTQ's or GPTQModel's configuration says; ConfigError names the field that cannot be served."""
    group = group_size(raw)
    if choice(raw, "desc_act", (True, False), False) and group is not None:
        raise refuse("desc_act", "is true: groups that follow the order of activations (act-order) are not supported")
    choice(raw, "lm_head", (False,), False)
    form = choice(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    left_out = raw.get("dynamic") or {}
    if not isinstance(left_out, Mapping) or not all(pattern.startswith("-:") for pattern in left_out):
        raise refuse(
            "dynamic", f"is {left_out!r}; schemes that differ by module are not supported, patterns to leave out (-:) are"
        )
    scheme = WeightScheme(
        form="gptq",
        bits=choice(raw, "bits", (4, 8)),
        group=group,
        symmetric=False,
        scale="scales",
        zeros_less_one=form == "gptq",
    )
    ignore = names({"dynamic": [f"re:{pattern[2:]}" for pattern in left_out]}, "dynamic")
    return CheckpointQuantization(method="gptq", rules=(Rule(("Linear",), scheme),), ignore=ignore)


def parse_mxfp4(raw: Mapping[str, Any]) -> CheckpointQuantization:
    """Returns the one scheme that there is. `modules_to_not_convert` adds nothing to what the tensors themselves say."""
    names(raw, "modules_to_not_convert")
    scheme = WeightScheme(form="mxfp4-pack-quantized", bits=4, group=32)
    return CheckpointQuantization(method="mxfp4", rules=(Rule(("Linear",), scheme),))
