"""`python -m tokenizer_proc <settings.json> <watch fd>`: one tokenizer process, as the launcher starts it."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the process to its end; the result is its exit code."""
    # One process tokenizes one prompt at a time; more of them are started for more.  Set before the library loads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from srt.child import run_worker
    from tokenizer_proc.process import serve

    return run_worker("tokenizer", serve, sys.argv)


if __name__ == "__main__":
    sys.exit(main())
