"""The client stays light: no torch, no engine."""

import subprocess
import sys


def test_bench_and_chat_load_neither_torch_nor_the_engine() -> None:
    heavy = ("torch", "transformers", "penstock.engine", "penstock.gateway", "penstock.operator")
    code = (
        "import sys, penstock.client.chat, penstock.client.bench.serve, penstock.client.bench.flags, penstock.client.cli\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
