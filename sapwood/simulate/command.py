"""`sapwood simulate`: which runs a command line asks for, and what is written about them."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sapwood.simulate.clients import Stalled
from sapwood.simulate.cost import Fitted, ModelShape, Profile, ProfileError, read_profile
from sapwood.simulate.flags import SWEEPS, Sweep
from sapwood.simulate.hardware import profile_by_name
from sapwood.simulate.plots import plot_run, plot_sweep, pyplot
from sapwood.simulate.readers import read_trace
from sapwood.simulate.report import Report, Targets, lines, report, table
from sapwood.simulate.runner import Knob, Simulation, scheduler_config, simulate
from sapwood.simulate.trace import Trace, TraceError, prepare
from srt.child import StartError


@dataclass(frozen=True)
class Job:
    """One run: what is varied, as text, and the values."""

    varied: dict[str, str]
    values: dict[str, Any]


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """Every combination of the lists.  Raises StartError for a value that is none."""
    given: list[tuple[str, list[tuple[str, Any]]]] = []
    for sweep in SWEEPS:
        text = getattr(arguments, sweep.flag.replace("-", "_"))
        if text is not None:
            given.append((sweep.flag, [(part, _value(sweep, part)) for part in text.split(",")]))
    result = []
    for choice in itertools.product(*(values for _, values in given)):
        pairs = list(zip(given, choice, strict=True))
        varied = {flag: text for (flag, values), (text, _) in pairs if len(values) > 1}
        result.append(Job(varied, {flag: value for (flag, _), (_, value) in pairs}))
    return result


def _value(sweep: Sweep, text: str) -> Any:
    try:
        value = sweep.kind(text)
    except ValueError:
        raise StartError(f"--{sweep.flag} {text!r}: not a number") from None
    if sweep.least is not None and not value >= sweep.least:
        raise StartError(f"--{sweep.flag} {text}: must be at least {sweep.least:g}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """The whole command; the exit code.  Raises StartError."""
    todo = jobs(arguments)
    for name, least in (("context_length", 2), ("max_requests", 1), ("tenants", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise StartError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    for name in ("csv", "plot"):
        path = getattr(arguments, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise StartError(f"--{name} {path}: no such folder")
    try:
        trace = read_trace(arguments.trace)
        profile = _profile(arguments)
    except (TraceError, ProfileError) as error:
        raise StartError(str(error)) from None
    if arguments.plot is not None:
        pyplot()
    targets = Targets(ttft=arguments.ttft_target, tpot=arguments.tpot_target)
    done: list[tuple[dict[str, str], Report]] = []
    last: Simulation | None = None
    for last in _simulations(trace, profile, todo, arguments):
        figures = report(last, targets)
        done.append((todo[len(done)].varied, figures))
        if len(todo) > 1:
            settings = ", ".join(f"{name} {value}" for name, value in done[-1][0].items())
            print(f"{settings}: {figures.wall:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(table(done) if len(done) > 1 else lines(done[0][1], targets)))
    if arguments.csv is not None:
        _write_csv(arguments.csv, todo, [figures for _, figures in done])
    if arguments.plot is not None:
        if len(done) > 1:
            plot_sweep(arguments.plot, done, trace.name)
        elif last is not None:
            plot_run(arguments.plot, last, trace.name)
    return 0


def _profile(arguments: argparse.Namespace) -> Profile:
    path = Path(arguments.profile)
    profile = read_profile(path) if path.suffix == ".json" or path.exists() else profile_by_name(arguments.profile)
    if arguments.model is None:
        return profile
    if isinstance(profile, Fitted):
        raise StartError("--model: this profile was measured with a model of its own; a roofline profile takes one")
    return msgspec.structs.replace(profile, model=shape_of(arguments.model))


def shape_of(folder: Path) -> ModelShape:
    """The shape of the model in a folder, stored in the format that it is computed in.  Raises StartError."""
    from srt.model.config import DTYPE_BYTES, UnsupportedModel, read_model_config

    try:
        config = read_model_config(folder)
    except UnsupportedModel as error:
        raise StartError(str(error)) from None
    width = DTYPE_BYTES.get(config.dtype, 2)
    return ModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        weight_bytes=width,
        kv_bytes=width,
    )


def _simulations(
    trace: Trace, profile: Profile, todo: list[Job], arguments: argparse.Namespace
) -> Iterator[Simulation]:
    for job in todo:
        knobs: dict[str, Knob] = {
            sweep.field: job.values[sweep.flag] for sweep in SWEEPS if sweep.field and sweep.flag in job.values
        }
        knobs["disable_radix_cache"] = arguments.disable_radix_cache
        knobs["overlap"] = not arguments.disable_overlap_schedule
        config = scheduler_config(
            profile,
            knobs,
            pool_tokens=job.values.get("max-total-tokens"),
            context_length=arguments.context_length,
        )
        room = min(config.model.context_length, config.num_pages * config.page_size)
        prepared = prepare(
            trace,
            rate=job.values.get("rate", 1.0),
            max_requests=arguments.max_requests,
            context=room,
            tenants=arguments.tenants,
        )
        if not prepared.requests:
            raise StartError(f"{trace.name}: no request fits into {room} tokens of context and pool")
        try:
            yield simulate(prepared, profile, config)
        except Stalled as error:
            raise StartError(f"the scheduler stalled: {error}") from None


def _write_csv(path: Path, todo: list[Job], done: list[Report]) -> None:
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*todo[0].values, *done[0].flat()])
            for job, figures in zip(todo, done, strict=True):
                writer.writerow([*job.values.values(), *figures.flat().values()])
    except OSError as error:
        raise StartError(f"--csv {path}: {error.strerror or error}") from None
