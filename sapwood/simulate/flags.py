"""The flags of `sapwood simulate` and `sapwood profile`.  Light: the command line reads this for its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sweep:
    """A setting that takes a list: its flag, the scheduler's name for it (None: not the scheduler's), its type."""

    flag: str
    field: str | None
    kind: Callable[[str], Any]
    text: str
    least: float | None = None


SWEEPS = (
    Sweep("schedule-policy", "schedule_policy", str, "order of the waiting requests (default: lpm)"),
    Sweep("page-size", "page_size", int, "tokens in a page (default: 16)", 1),
    Sweep("chunked-prefill-size", "max_step_tokens", int, "token budget of a step (default: 512)", 1),
    Sweep("max-total-tokens", None, int, "tokens in the KV pool (default: as the profile says, or 131072)", 2),
    Sweep("max-running-requests", "max_running_requests", int, "requests that run at once (default: 64)", 1),
    Sweep("tpot-target-ms", "tpot_target_ms", float, "milliseconds from token to token that prompts leave room for", 0),
    Sweep("rate", None, float, "arrivals come so many times as fast (default: 1)", 1e-9),
)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """The flags of `sapwood simulate`."""
    parser.add_argument("--trace", required=True, type=Path, help="trace: Mooncake, Azure, agentic, or a recording")
    parser.add_argument(
        "--profile", required=True, help="step times: a JSON file, or a known machine and model such as h100-llama-8b"
    )
    parser.add_argument("--model", type=Path, default=None, help="take the model's shape from this folder (roofline)")
    for sweep in SWEEPS:
        parser.add_argument(f"--{sweep.flag}", default=None, metavar="A,B,..", help=sweep.text)
    parser.add_argument("--context-length", type=int, default=None, help="longest prompt and output together")
    parser.add_argument("--disable-radix-cache", action="store_true", help="do not reuse prefixes")
    parser.add_argument("--disable-overlap-schedule", action="store_true", help="plan only when no step runs")
    parser.add_argument("--max-requests", type=int, default=None, help="only the first so many of the trace")
    parser.add_argument("--tenants", type=int, default=0, help="deal the requests out to so many tenants, unevenly")
    parser.add_argument("--ttft-target", type=float, default=None, help="seconds to the first token, for goodput")
    parser.add_argument("--tpot-target", type=float, default=None, help="seconds from token to token, for goodput")
    parser.add_argument("--csv", type=Path, default=None, help="write every figure of every run to this file")
    parser.add_argument("--plot", type=Path, default=None, help="draw into this file (.png, .svg, .pdf)")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """The flags of `sapwood profile`."""
    parser.add_argument("--model", required=True, help="model to measure, as for serve")
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), help="file to write (default: %(default)s)"
    )
    parser.add_argument("--chunked-prefill-size", type=int, default=None, help="largest step to measure, in tokens")
    parser.add_argument("--max-running-requests", type=int, default=64, help="largest batch (default: %(default)s)")
    parser.add_argument("--context-length", type=int, default=None, help="longest context (default: at most 4096)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="as for serve")
    parser.add_argument("--threads", type=int, default=None, help="as for serve")
    parser.add_argument("--attention-backend", choices=("auto", "native", "torch"), default="auto", help="as for serve")
    parser.add_argument(
        "--repeats", type=int, default=3, help="times that each step is measured (default: %(default)s)"
    )
