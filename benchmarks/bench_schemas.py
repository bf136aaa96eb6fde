"""JSON schemas at the engine's own interface: what is refused, which instances are taken for what they are, and what masks cost.

    make bench-schemas ARGS=schemas.jsonl

Each line of the file has `name`, `schema` and `tests`, as JSONSchemaBench has them; a test has `data` and whether it is
`valid`. An instance is written as `json.dumps` does. It is accepted if every token of it is in its mask and the answer may end
after the last. The tokenizer is the demo model's.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from report import write_results
from tokenizers import Tokenizer

from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.core.grammar.guide import GrammarGuide
from penstock.engine.core.grammar.libraries import GrammarError
from penstock.engine.grammar import Grammar, GrammarBackend
from penstock.engine.loading.checkpoint import read_model_config

MODEL = Path(__file__).parents[1] / "examples/models/penstock-tiny"


class Bench:
    """Follows instances token by token, as a step loop does.

    Args:
        backend: The library.
        lenient: Whether keywords that cannot be enforced are left out.
    """

    def __init__(self, backend: GrammarBackend, lenient: bool) -> None:
        self._backend: GrammarBackend = backend
        self._lenient = lenient
        self._model = read_model_config(MODEL, served_names=[])
        self._compiler = Compiler(self._model)
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.compile_s: list[float] = []
        self.fill_s: list[float] = []
        self.counts = Counter[str]()
        self.refusals = Counter[str]()

    def schema(self, schema: Any, tests: Sequence[dict[str, Any]]) -> None:
        """Takes one schema and its instances."""
        grammar = Grammar("json_schema", json.dumps(schema), "schema", lenient=self._lenient, backend=self._backend)
        begin = time.perf_counter()
        try:
            prototype = self._compiler.compile(grammar)
        except GrammarError as error:
            self.counts["refused"] += 1
            self.refusals[str(error).partition(" at $")[0][:60]] += 1
            return
        self.compile_s.append(time.perf_counter() - begin)
        self.counts["compiled"] += 1
        eos, right = self._model.eos_token_ids, True
        for test in tests:
            accepted = self._follow(GrammarGuide(prototype, eos, eos), json.dumps(test["data"]))
            right = right and accepted == test["valid"]
            self.counts[("valid " if test["valid"] else "invalid ") + ("accepted" if accepted else "rejected")] += 1
        self.counts["wholly right"] += right

    def close(self) -> None:
        """Ends what the library runs."""
        self._compiler.close()

    def _follow(self, guide: GrammarGuide, text: str) -> bool:
        mask = np.empty((1, guide.num_words), np.int32)
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            mask[:] = -1
            begin = time.perf_counter()
            guide.fill(mask, ())
            self.fill_s.append(time.perf_counter() - begin)
            if not mask[0, token // 32] >> token % 32 & 1:
                return False
            guide.accept([token])
        return guide.error is None and not guide.is_open


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In microseconds."""
    ordered = sorted(seconds)
    found = {f"p{share}": ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] for share in (50, 90, 99)}
    return {
        name: round(1e6 * value, 1) for name, value in (found | {"mean": statistics.fmean(ordered), "max": ordered[-1]}).items()
    }


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path, help="a file of schemas, one JSON object a line")
    path: Path = parser.parse_args().schemas
    results: dict[str, Any] = {}
    for backend, mode in itertools.product(get_args(GrammarBackend), ("strict", "lenient")):
        bench = Bench(backend, mode == "lenient")
        with path.open() as lines:
            for line in lines:
                entry = json.loads(line)
                bench.schema(entry["schema"], entry["tests"])
        bench.close()
        results[f"{backend}, {mode}"] = {
            **dict(sorted(bench.counts.items())),
            "compile us": percentiles(bench.compile_s[1:]),  # the first one loads the tokenizer
            "fill us": percentiles(bench.fill_s),
            "refusals": dict(bench.refusals.most_common(12)),
        }
    print(json.dumps(results, indent=2))
    write_results("schemas", results)


if __name__ == "__main__":
    main()
