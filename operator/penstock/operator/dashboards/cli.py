"""The command `penstock dashboards`. Light to import: `penstock --help` loads this module."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.operator.dashboards.files import Dashboard

HOW = """
To get them: `helm upgrade penstock charts/penstock --reuse-values --set monitoring.enabled=true` makes ConfigMaps for the
sidecar of Grafana's chart; `kubectl penstock dashboards --url GRAFANA --import --token-file FILE` puts them into any Grafana;
`kubectl penstock dashboards --export DIR` writes JSON to import by hand, and ConfigMaps.
"""


def dashboards(argv: list[str]) -> int:
    """Lists the Grafana dashboards, links to them, writes them to files, or puts them into a Grafana.

    Returns 0; 1 where a file cannot be read or written, or Grafana refuses.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.url is None and (options.put or options.model):
        parser.error("--import and --model need --url")
    if not options.put and (options.token_file or options.folder):
        parser.error("--token-file and --folder need --import")
    from penstock.operator.dashboards import files
    from penstock.operator.dashboards.grafana import GrafanaRefused, import_into

    made = files.dashboards(options.runbook_url)
    try:
        if options.export is not None:
            for path in files.export(options.export, made):
                sys.stdout.write(f"{path}\n")
            sys.stdout.write(f"\nkubectl apply --server-side -n NAMESPACE-OF-GRAFANA -f {options.export / 'configmaps.yaml'}\n")
        if options.put and options.url is not None:
            token = None if options.token_file is None else options.token_file.read_text().strip()
            import_into(options.url, token, options.folder, made)
    except (OSError, GrafanaRefused) as error:
        sys.stderr.write(f"penstock dashboards: {error}\n")
        return 1
    if options.export is None or options.url is not None:
        _show(made, options.url, options.model)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock dashboards", description=(dashboards.__doc__ or "").partition("\n")[0])
    parser.add_argument("--export", type=Path, metavar="DIR", help="write them into this folder, as JSON and as ConfigMaps")
    parser.add_argument(
        "--url", metavar="GRAFANA", help="Grafana's address for links and --import, such as https://grafana.example.com"
    )
    parser.add_argument("--model", type=_model, metavar="NAMESPACE/NAME", help="link to the dashboards filtered by this model")
    parser.add_argument(
        "--import", dest="put", action="store_true", help="import them into the Grafana at --url, replacing older ones"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token of a Grafana service account that may import"
    )
    parser.add_argument("--folder", metavar="UID", help="UID of the Grafana folder to import into (default: the general one)")
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        help="address where your team reads docs/runbooks, for links in panels (default: that path)",
    )
    return parser


def _model(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


def _show(made: "list[Dashboard]", grafana: str | None, model: tuple[str, str] | None) -> None:
    for it in made:
        sys.stdout.write(f"{it.title:<24} {it.uid}\n    {it.question}\n")
        if grafana is not None:
            chosen = {} if model is None else {"namespace": model[0], "model": model[1]}
            sys.stdout.write(f"    {it.link(grafana, **chosen)}\n")
    if grafana is None:
        sys.stdout.write(HOW)
