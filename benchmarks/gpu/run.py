"""One figure in this process: `python -m gpu.run NAME`, from the folder above; the result is the last line, as JSON."""

import importlib
import json
import sys

from gpu.figures import FIGURES, Row


def measure(name: str) -> Row:
    """What the figure's module says."""
    figure = FIGURES[name]
    return importlib.import_module(f"gpu.{figure.module}").measure(*figure.arguments)


if __name__ == "__main__":
    print(json.dumps({"value": 1.0, "bound_by": "a stand-in"} if "--dry-run" in sys.argv else measure(sys.argv[1])))
