"""`vllm bench serve`, time and again: takes its flags as a JSON list a line, and says `done` and the result's name after each.

Without the `vllm` command, which asks for a distribution of that name.
"""

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        args = parser.parse_args(json.loads(line))
        main(args)
        print(f"\ndone {args.result_filename}", flush=True)
