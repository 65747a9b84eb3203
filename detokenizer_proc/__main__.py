"""`python -m detokenizer_proc <settings.json> <watch fd>`: the detokenizer process, as the launcher starts it."""

from __future__ import annotations

import sys

from detokenizer_proc.process import serve
from srt.child import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("detokenizer", serve, sys.argv))
