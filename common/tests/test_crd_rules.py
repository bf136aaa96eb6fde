"""The CEL rules of the CRDs, evaluated as the API server does: they refuse what our own checks refuse, with the same words."""

import copy
import datetime
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import ascii_letters, digits
from typing import Any
from zoneinfo import ZoneInfo

import cel
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_resources import BROKEN, DAY, DECODE, PREFILL, WHOLE, resource

from penstock.api.resources import InferenceModel, LoraAdapter, crds

Object = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples"


def adapter(uri: str) -> Object:
    """A small LoraAdapter."""
    spec = {"modelRef": {"name": "m"}, "served": {"name": "sql"}, "source": {"uri": uri}}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": {"name": "sql"}, "spec": spec}


REFUSED = [
    *(resource(**changes) for changes, _ in BROKEN),
    {**resource(), "metadata": {"name": "8b"}},
    {**resource(), "metadata": {"name": "a" * 41}},
    adapter("adapters/a"),
    adapter("s3://team-a/../team-b"),
    adapter("file:///a/.."),
    resource(pools=[{"name": "a", "scaling": {"max": 3, "slo": {"ttft": "2h"}}}]),
    resource(pools=[{"name": "a", "scaling": {"max": 3, "min": 0, "scaleToZeroAfter": "169h"}}]),
    resource(pools=[{"name": "a", "scaling": {"max": 3, "schedule": [{**DAY, "start": "0 8 * * 5-1"}]}}]),
]
"""Each breaks a rule, or is not of the schema."""


SLOS = [{"ttft": "1ms"}, {"ttft": "1h"}, {"itl": "1ms"}, {"itl": "1m"}]


@cache
def schema(kind: str) -> Object:
    (crd,) = [it for it in crds() if it["spec"]["names"]["kind"] == kind]
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def defaulted(value: Any, node: Object) -> Any:
    """The value with the schema's defaults, which the API server fills in before it looks at rules."""
    if isinstance(value, list):
        return [defaulted(item, node["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in node:
        return value
    known = node["properties"]
    missing = {name: child["default"] for name, child in known.items() if "default" in child and name not in value}
    return {name: defaulted(it, known.get(name, {})) for name, it in {**missing, **value}.items()}


def rules(value: Any, node: Object) -> Iterator[tuple[Object, Any]]:
    """Each rule of the schema with the value that it is about, where there is one."""
    for rule in node.get("x-kubernetes-validations", []):
        yield rule, value
    if isinstance(value, list):
        for item in value:
            yield from rules(item, node["items"])
    elif isinstance(value, dict):
        for name, child in node.get("properties", {}).items():
            if name in value:
                yield from rules(value[name], child)


def holds(rule: Object, value: Any, old: Any) -> bool:
    """Whether a rule holds. As at the API server, one that cannot be evaluated does not."""
    context = cel.Context()
    context.add_variable("self", value)
    context.add_variable("oldSelf", old)
    # Kubernetes' own functions, as far as our rules use them.
    context.add_function("isSorted", lambda items: list(items) == sorted(items))
    context.add_function("sum", sum)
    context.add_function("split", lambda text, separator: text.split(separator))
    context.add_function("getHours", hour)
    try:
        return bool(cel.evaluate(rule["rule"], context))
    except (ValueError, RuntimeError, TypeError, KeyError):
        return False


def hour(time: datetime.datetime, zone: str) -> int:
    try:
        return time.astimezone(ZoneInfo(zone)).hour
    except (KeyError, OSError) as error:
        raise ValueError(f"no time zone {zone!r}") from error


def broken(made: Object) -> set[str]:
    """The sentences of the rules that a new object breaks."""
    node = schema(made["kind"])
    found = rules(defaulted(made, node), node)
    return {rule["message"] for rule, value in found if "oldSelf" not in rule["rule"] and not holds(rule, value, None)}


def every_rule() -> dict[str, Object]:
    """Sentence → rule, of all CRDs."""

    def below(node: Object) -> Iterator[Object]:
        yield from node.get("x-kubernetes-validations", [])
        for child in [*node.get("properties", {}).values(), *([node["items"]] if "items" in node else [])]:
            yield from below(child)

    return {rule["message"]: rule for kind in ("InferenceModel", "LoraAdapter") for rule in below(schema(kind))}


def refused_by_us(made: Object) -> set[str]:
    """The sentences of rules that our own check says."""
    kind = InferenceModel if made["kind"] == "InferenceModel" else LoraAdapter
    with pytest.raises(ValidationError) as refused:
        kind.parse(made)
    return {message for message in every_rule() if message in str(refused.value)}


@pytest.mark.req("XC-02")
@pytest.mark.parametrize("made", REFUSED, ids=lambda made: str(made["spec"])[:90])
def test_the_api_server_refuses_what_we_refuse_and_says_the_same(made: Object) -> None:
    """Our own check stops at the first rule of a part that does not hold; CEL says all of them."""
    if expected := refused_by_us(made):  # else it is the schema that refuses it, which comes before any rule
        assert expected <= broken(made)


@pytest.mark.req("XC-02")
@pytest.mark.parametrize("sentence", [sentence for sentence, rule in every_rule().items() if "oldSelf" not in rule["rule"]])
def test_each_rule_is_broken_by_some_case(sentence: str) -> None:
    assert any(sentence in refused_by_us(made) for made in REFUSED)


@cache
def valid() -> list[Object]:
    files = [yaml.safe_load_all(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))]
    ours = [it for docs in files for it in docs if it and it["kind"] in ("InferenceModel", "LoraAdapter")]
    whole_day = {**DAY, "start": "*/5 0-23/2,7 1,15 * 0,7", "timeZone": "Europe/Berlin"}
    more = [
        resource(),
        # At the edge of a rule.
        resource(lora={"slots": 4, "cpuSlots": 4}),
        resource(pools=[{"name": "a", "cost": 10, "scaling": {"min": 2, "max": 2, "warm": 2}}], scaling={"budget": 20}),
        resource(
            pools=[PREFILL, {**DECODE, "scaling": {"max": 2}}],
            engine={"connector": {"type": "nixl"}},
            scaling={"prefillPerDecode": {"minPercent": 9, "maxPercent": 9}},
        ),
        *(resource(routing={"holdTimeout": it}, drainTimeout=it) for it in ("0s", "1h")),
        *(resource(rollout={"progressDeadline": it}) for it in ("10s", "24h")),
        *(resource(pools=[{"name": "a", "scaling": {"max": 3, "downWindow": it}}]) for it in ("0s", "24h")),
        *(resource(pools=[{"name": "a", "scaling": {"max": 3, "slo": slo}}]) for slo in SLOS),
        {**resource(), "metadata": {"name": "a" * 40}},
        resource(pools=[{"name": "a", "scaling": {"max": 3, "min": 0, "scaleToZeroAfter": "168h", "schedule": [whole_day]}}]),
        resource(canary={"of": "old", "weight": 50, "judge": {"steps": [1, 49], "window": "5s"}}),
        resource(source={"uri": "pvc://claim/path"}),
        resource(canary={"of": "old", "weight": 50, "judge": {}}),
        adapter("hf://org/name"),
    ]
    return [WHOLE, *ours, *more]


@pytest.mark.req("XC-02")
@pytest.mark.parametrize("made", valid(), ids=lambda made: str(made["spec"])[:90])
def test_the_api_server_takes_what_we_take(made: Object) -> None:
    (InferenceModel if made["kind"] == "InferenceModel" else LoraAdapter).parse(made)
    assert broken(made) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (resource(pools=[{"name": "a", "role": "Prefill"}]), resource(pools=[{"name": "a", "role": "Decode"}])),
        (adapter("/a"), adapter("/a") | {"spec": adapter("/a")["spec"] | {"modelRef": {"name": "other"}}}),
    ],
    ids=["a pool's role", "an adapter's model"],
)
def test_what_may_not_change_keeps_its_value(before: Object, after: Object) -> None:
    node = schema(before["kind"])
    pairs = [rules(defaulted(made, node), node) for made in (before, after)]
    changes = [(rule, old, new) for (rule, old), (_, new) in zip(*pairs, strict=True) if "oldSelf" in rule["rule"]]
    assert changes
    assert all(holds(rule, old, old) for rule, old, _ in changes)
    assert not any(holds(rule, new, old) for rule, old, new in changes)


WORDS = [
    "/m", "hf://a/b", "file:///a", "file:///a/..", "pvc://claim/m", "pvc://claim", "pvc://-", "s3://b/k", "m", "ngram", "suffix",
    "mooncake://m:1", "eagle", "draft_model", "none", "nixl", "--port=1", "--dtype", "--kv-cache-memory-bytes=1G",
    "--num-gpu-blocks-override", "--seed=1", "a", "b", "tiny", "old", "default",
    "2026-01-31T12:00:00Z", "100",
]  # fmt: skip
DURATIONS = ["0s", "1ms", "1s", "9s", "10s", "59s", "1m", "1h", "61m", "24h", "25h", "168h", "169h"]
CRONS = ["0 8 * * 1-5", "0 8 * * 5-1", "*/5 0-23/2,7 1,15 * 0,7", "9-3/2 * * * *"]
ZONES = ["UTC", "Europe/Berlin", "Europe/Atlantis"]


def values(node: Object) -> st.SearchStrategy[Any]:
    """Values of a schema, with numbers near each other and words that rules are about."""
    kind = node.get("type")
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return st.sampled_from([0, 1, 5, "25%"])
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        low, high = node.get("minimum", 0), node.get("maximum", 9)
        return st.integers(low, min(high, low + 6)) | st.just(high)
    if kind == "array":
        return st.lists(values(node["items"]), min_size=node.get("minItems", 0), max_size=2)
    if kind == "object" and "properties" in node:
        required = {name: values(child) for name, child in node["properties"].items() if name in node.get("required", [])}
        rest = {name: values(child) for name, child in node["properties"].items() if name not in required}
        return st.fixed_dictionaries(required, optional=rest)
    if kind == "object":
        return st.just({})
    fitting = [word for word in (*WORDS, *DURATIONS, *CRONS, *ZONES) if fits(word, node)]
    return (
        st.sampled_from(fitting)
        if fitting
        else st.from_regex(node["pattern"].replace("$", r"\Z"), alphabet=ascii_letters + digits + "/.-")
    )


def fits(word: str, node: Object) -> bool:
    return node.get("minLength", 0) <= len(word) <= node.get("maxLength", 9999) and bool(re.search(node.get("pattern", ""), word))


def parts(value: Any, node: Object) -> list[tuple[Object, Object]]:
    """Each part of an object that rules are about, with its schema."""
    if isinstance(value, list):
        return [part for item in value for part in parts(item, node["items"])]
    known = node.get("properties", {})
    if not isinstance(value, dict) or not known:
        return []
    below = [part for name, child in known.items() if name in value for part in parts(value[name], child)]
    return [(value, node), *below] if "x-kubernetes-validations" in node else below


@cache
def having() -> dict[str, list[Object]]:
    """The valid objects that have a part, by what the part's schema says."""
    found: dict[str, list[Object]] = {}
    for made in valid():
        for _, node in parts(made["spec"], schema(made["kind"])["properties"]["spec"]):
            found.setdefault(node["description"], []).append(made)
    return found


@st.composite
def changed(draw: st.DrawFn) -> Object:
    """A valid object with some fields of one part set at random, or taken away."""
    chosen, objects = draw(st.sampled_from(sorted(having().items(), key=lambda it: it[0])))
    made = copy.deepcopy(draw(st.sampled_from(objects)))
    found = parts(made["spec"], schema(made["kind"])["properties"]["spec"])
    part, node = next((part, node) for part, node in found if node["description"] == chosen)
    about = " ".join(rule["rule"] for rule in node["x-kubernetes-validations"])
    names = [name for name in node["properties"] if re.search(rf"self[.]{name}\b", about)]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        if name in part and name not in node.get("required", []) and draw(st.booleans()):
            del part[name]
        else:
            part[name] = draw(values(node["properties"][name]))
    return made


@pytest.mark.req("XC-02")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(made=changed())
def test_the_api_server_and_our_own_check_agree_about_random_objects(made: Object) -> None:
    """Both forms of each rule, on objects that nobody thought of."""
    pools = [pool["name"] for pool in made["spec"].get("pools", [])]
    assume(len(set(pools)) == len(pools))  # the API server knows by the list's key, not by a rule
    sentences = broken(made)
    try:
        (InferenceModel if made["kind"] == "InferenceModel" else LoraAdapter).parse(made)
        said = set[str]()
    except ValidationError as refused:
        # Our own check stops at the first rule of a part, and looks at no part with a broken one below.
        said = {message for message in every_rule() if message in str(refused)}
        assert said, f"no rule, but the schema: {refused}"
    assert said <= sentences
    assert bool(said) == bool(sentences)
