"""The chart's README, from the comments of its values. `make chart` writes it, and the icon into Chart.yaml."""

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHART: Final = Path(__file__).parent / "penstock"
ICON: Final = Path(__file__).parent / "icon.svg"
_SECTION: Final = re.compile(r"# ---- (.+)")
_VALUE: Final = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: +(?P<default>[^ #].*?))?(?: +# (?P<help>.+))?")
HEAD: Final = """# The Helm chart

Installs the operator, the gateway and Envoy, and the CRDs `InferenceModel` and `LoraAdapter`.

```
helm install penstock charts/penstock --namespace penstock-system --create-namespace
kubectl apply -f examples/tiny.yaml
```

[The operator's manual](../../docs/operator/install.md) says how to install from a mirror, for some namespaces only and with TLS,
and how to upgrade and remove it.

`make chart` writes this page from the comments in `values.yaml`.
"""


@dataclass(frozen=True)
class Value:
    """One value of the chart."""

    section: str
    path: str
    default: str
    """As YAML."""
    help: str


def values(text: str) -> Iterator[Value]:
    """The values in a values.yaml, each with the comment on its line. Nested blocks are indented by two spaces."""
    section, parents = "", list[str]()
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line):
            section = heading[1]
        elif found := _VALUE.fullmatch(line):
            parents = [*parents[: len(found["indent"]) // 2], found["name"]]
            if found["default"]:
                yield Value(section, ".".join(parents), found["default"], found["help"] or "")


def readme(text: str) -> str:
    """The README for a values.yaml."""
    parts, section = [HEAD], ""
    for value in values(text):
        if value.section != section:
            section = value.section
            parts.append(f"\n## {section}\n\n| value | default | |\n| --- | --- | --- |\n")
        parts.append(f"| `{value.path}` | `{value.default}` | {value.help} |\n")
    return "".join(parts)


def icon() -> str:
    """The icon as the URL that Helm wants, which needs no server."""
    return f"data:image/svg+xml;base64,{b64encode(ICON.read_bytes()).decode()}"


def main() -> None:
    """Writes both."""
    (CHART / "README.md").write_text(readme((CHART / "values.yaml").read_text()))
    chart = CHART / "Chart.yaml"
    chart.write_text(re.sub(r"(?m)^icon: .*$", f"icon: {icon()}", chart.read_text()))


if __name__ == "__main__":
    main()
