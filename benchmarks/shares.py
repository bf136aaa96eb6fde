"""Where the CPU time of a picker's requests goes, by samples of the stack."""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from types import FrameType

from rich.table import Table

PERIOD_S = 0.001
"""CPU time between two samples; the kernel may take them less often."""
PARTS = (
    ("the benchmark itself", ("benchmarks/",)),
    (
        "tokenising and hashing",
        ("prompt/memo.py", "prompt/cuts.py", "prompt/hashing.py", "compiled_hasher.py", "encode_pieces", "load/tokenized.py"),
    ),
    (
        "chat template",
        (
            "jinja2/",
            "<template>",
            "prompt/",
        ),
    ),
    ("JSON of the body", ("extproc/body.py",)),
    (
        "protobuf in",
        (
            "h2/methods.py:Method.deserialize",
            "extproc/wire.py:CompiledWire.read",
            "extproc/wire.py:PlainWire.read",
            "extproc/wire.py:read_headers",
            "extproc/wire.py:_",
        ),
    ),
    ("answers, protobuf out", ("extproc/answers.py", "extproc/wire.py")),
    ("HTTP/2", ("gateway/h2/",)),
    ("load reports", ("api/load_report.py", "api/events.py", "load/reports.py")),
    ("bookings", ("picker/bookings.py", "picker/coming.py", "extproc/underway.py")),
    ("flow control", ("gateway/flow/", "stages/admit.py")),
    ("metrics", ("prometheus_client/", "http/metrics.py", "http/flow_metrics.py")),
    ("pick", ("gateway/picker/", "gateway/residency/", "stages/pick.py", "numpy/")),
    ("exchange and stages", ("gateway/extproc/", "gateway/")),
)
"""Parts, with what a file or `file:function` has in it; the first that fits the innermost frame that any fits."""
OTHER = "other"


def part_of(frame: FrameType | None) -> str:
    """What the innermost known function does."""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        for part, marks in PARTS:
            if any(mark in place for mark in marks):
                return part
        frame = frame.f_back
    return OTHER


class Shares:
    """Samples by layer."""

    def __init__(self) -> None:
        self._samples: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def of(self, layer: str) -> Iterator[None]:
        """Takes samples of this thread's stack."""
        counts = self._samples.setdefault(layer, Counter())

        def sample(_: int, frame: FrameType | None) -> None:
            counts[part_of(frame)] += 1

        before = signal.signal(signal.SIGPROF, sample)
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)

    def table(self) -> Table:
        """A row a layer, in per cent, the largest first."""
        table = Table("layer", "per cent of the CPU time", title="Where it goes", show_lines=True)
        for layer, counts in self._samples.items():
            shares = [(part, 100 * count / counts.total()) for part, count in counts.most_common()]
            table.add_row(layer, ", ".join(f"{part} {share:.0f}" for part, share in shares))
        return table
