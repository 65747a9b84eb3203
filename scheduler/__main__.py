"""`python -m scheduler <settings.json> <watch fd>`: the scheduler process."""

import sys

from scheduler.process import serve
from srt.child import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("scheduler", serve, sys.argv))
