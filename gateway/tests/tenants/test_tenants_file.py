"""The tenants file: what it says, what is wrong with it and where, and that a change is taken in, or refused, as a whole."""

import hashlib
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.gateway.cli import gateway as gateway_command
from penstock.gateway.tenants.document import TenantsError, parse
from penstock.gateway.tenants.registry import Registry
from penstock.gateway.tenants.watch import TenantsWatcher

GOOD = """
anonymous:
  priority: 100
  requestsPerMinute: 10
tenants:
  - name: search
    keys: [sk-search-1, "sha256:HASH"]
    weight: 3
    maxConcurrent: 5
    models: [tiny, "llama-*"]
  - name: batch
    priority: 50
    keys: [sk-batch-001]
""".replace("HASH", hashlib.sha256(b"sk-search-2").hexdigest())


def test_keys_lead_to_tenants_whether_hashed_or_not() -> None:
    registry = Registry(parse(GOOD))
    for key in ("sk-search-1", "sk-search-2"):
        tenant = registry.find(key)
        assert tenant is not None and tenant.name == "search"
        assert (tenant.limits.weight, tenant.limits.max_concurrent, tenant.limits.priority) == (3.0, 5, 0)
        assert [tenant.limits.may_use(name) for name in ("tiny", "llama-8b", "large", "xtiny")] == [True, True, False, False]
    assert registry.find("sk-batch-001").limits.may_use("anything")  # type: ignore[union-attr]
    for wrong in ("sk-search-3", "", "sk-search-", hashlib.sha256(b"sk-search-2").hexdigest(), "\udcff"):
        assert registry.find(wrong) is None
    assert registry.anonymous is not None
    assert (registry.anonymous.name, registry.anonymous.limits.priority) == ("anonymous", 100)


def test_json_is_fine_and_without_a_word_nobody_without_a_key_is_served() -> None:
    registry = Registry(parse('{"tenants": [{"name": "a", "keys": ["12345678"]}], "passKeys": true}'))
    assert registry.anonymous is None and registry.pass_keys
    assert Registry(parse("anonymous: allow")).anonymous is not None
    assert Registry(parse("")).anonymous is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("tenants:\n  - name: a\n    wieght: 3", 3, "unknown field `wieght`"),
        ("tenants:\n  - name: a\n    weight: 0", 3, "$.tenants[0].weight: Expected `float` > 0"),
        ("tenants:\n  - keys: [abcdefgh]", 2, "missing required field `name`"),
        ("tenants:\n  - name: a b", 2, "$.tenants[0].name"),
        ("tenants:\n  - name: anonymous", 2, "those without a key"),
        ("tenants:\n  - name: a\n  - name: a", 3, "is there twice"),
        ("tenants:\n  - name: a\n    priority: 1\n    priority: 2", 4, "priority is there twice"),
        ("tenants:\n  - name: a\n    keys: [short]", 3, "at least 8"),
        ("tenants:\n  - name: a\n    keys:\n      - okay-key\n      - 'sha256:abc'", 5, "64 hexadecimal digits"),
        ("tenants:\n  - name: a\n    keys: [same-key-1]\n  - name: b\n    keys: [same-key-1]", 5, "stands at line 3"),
        ("tenants:\n  - name: a\n    requestsPerMinute: many", 3, "Expected `int | null`, got `str`"),
        ("anonymous: maybe", 1, "$.anonymous"),
        ("tenants: [\nsecret-key", 2, "not YAML"),
        ("- a", 1, "Expected `object`"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_never_with_keys(text: str, line: int, words: str) -> None:
    with pytest.raises(TenantsError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"line {line}: ") and words in message
    for key in ("okay-key", "short", "same-key-1", "sha256:abc", "secret-key"):
        assert key not in message


@pytest.mark.parametrize(
    "text",
    [
        "tenants:\n  - name: 2024-13-45",
        "tenants: !!int secret-key",
        "tenants: !!float secret-key",
        "tenants: &all [*all]",
        "tenants: " + "[" * 2000 + "]" * 2000,
        "tenants:\n  - name: a\n    tokensPerMinute: " + "9" * 5000,
        "tenants:\n  - name: a\n    tokensPerMinute: " + "9" * 400,
    ],
    ids=lambda text: text[:30],
)
def test_no_file_is_more_than_refused(text: str) -> None:
    """Whatever somebody puts into the Secret while the gateway runs."""
    with pytest.raises(TenantsError) as caught:
        parse(text)
    assert "secret-key" not in str(caught.value)


def test_a_change_is_taken_in_and_a_bad_one_refused_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the links of a mounted Secret, which Kubernetes replaces at one stroke."""
    mount = tmp_path / "mount"

    def put(version: str, text: str) -> None:
        folder = mount / version
        folder.mkdir(parents=True)
        (folder / "tenants.yaml").write_text(text)
        (mount / "new").symlink_to(version)
        (mount / "new").replace(mount / "..data")

    put("..1", GOOD)
    (mount / "tenants.yaml").symlink_to("..data/tenants.yaml")
    counts = CollectorRegistry()
    watcher = TenantsWatcher(mount / "tenants.yaml", counts)
    registry = watcher.registry
    account = registry.account(registry.find("sk-search-1"))  # type: ignore[arg-type]
    put("..2", "tenants:\n  - name: search\n    keys: [sk-search-9]\n")
    watcher.look()
    assert registry.find("sk-search-1") is None
    assert registry.account(registry.find("sk-search-9")) is account  # type: ignore[arg-type]
    put("..3", "tenants: [{name: search, keys: [sk-sear")
    with caplog.at_level(logging.ERROR):
        watcher.look()
        watcher.look()
        (mount / "tenants.yaml").unlink()
        watcher.look()
        watcher.look()
    assert registry.find("sk-search-9") is not None
    assert len(caplog.records) == 2
    assert "line 1: not YAML" in caplog.records[0].message and "sk-sear" not in caplog.text
    assert "No such file" in caplog.records[1].message
    results = {
        result: counts.get_sample_value("penstock_tenants_reloads_total", {"result": result}) for result in ("ok", "error")
    }
    assert results == {"ok": 1.0, "error": 2.0}


def test_a_bad_file_at_the_start_ends_the_gateway_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, fleet = tmp_path / "tenants.yaml", tmp_path / "fleet.json"
    path.write_text("tenants:\n  - name: 3\n")
    fleet.write_text("{}")
    ports = [f"--{name}-port=0" for name in ("grpc", "http")]
    assert gateway_command([f"--tenants={path}", f"--discovery=file:{fleet}", *ports]) == 1
    assert "line 2: $.tenants[0].name: Expected `str`, got `int`" in capsys.readouterr().err
