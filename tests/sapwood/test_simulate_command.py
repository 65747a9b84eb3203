"""`sapwood simulate` and `sapwood profile` from the command line: sweeps, files, pictures, faults in one line."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sapwood.cli import main
from sapwood.simulate.command import shape_of
from sapwood.simulate.cost import Fitted, Load, Scheduling, read_profile, write_profile
from sapwood.simulate.readers import RecordedRow, write_recording
from sapwood.simulate.report import Report

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def trace(test_data: Path) -> str:
    """Two dozen conversations."""
    return str(test_data / "traces" / "mooncake.jsonl")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A made-up machine."""
    path = tmp_path / "machine.json"
    made = Fitted(tokens=[(1, 0.01), (512, 0.05)], scheduling=Scheduling(step=0.001), pool_tokens=200_000)
    write_profile(path, made)
    return str(path)


def test_one_run_is_told_in_words(trace: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace, "--profile", profile, "--ttft-target", "3", "--tenants", "2"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    for word in ("24 of 24 served", "hit rate", "TTFT", "goodput", "worst wait", "retractions", "Jain index"):
        assert word in told.out


def test_a_sweep_runs_every_combination_and_writes_every_figure(
    trace: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.csv"
    sweep = ["--schedule-policy", "lpm,fcfs", "--page-size", "16,64", "--rate", "2", "--csv", str(path)]
    assert main(["simulate", "--trace", trace, "--profile", profile, *sweep]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    varied = [(row["schedule-policy"], row["page-size"], row["rate"]) for row in rows]
    assert varied == [("lpm", "16", "2.0"), ("lpm", "64", "2.0"), ("fcfs", "16", "2.0"), ("fcfs", "64", "2.0")]
    assert {row["served"] for row in rows} == {"24"}
    figures = {name for name in Report.__struct_fields__ if name in rows[0] or f"{name}_mean" in rows[0]}
    assert figures == set(Report.__struct_fields__)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5
    # What has one value is not varied, and needs no column.
    assert shown[0].split()[:3] == ["schedule-policy", "page-size", "hit"]


def test_the_settings_reach_the_scheduler(trace: str, profile: str, tmp_path: Path) -> None:
    def figures(*flags: str) -> dict[str, float]:
        path = tmp_path / "run.csv"
        assert main(["simulate", "--trace", trace, "--profile", profile, "--csv", str(path), *flags]) == 0
        with path.open() as file:
            (row,) = csv.DictReader(file)
        return {name: float(value) for name, value in row.items() if value and name != "schedule-policy"}

    plain = figures()
    assert plain["hit_rate"] > 0.0
    assert figures("--disable-radix-cache")["hit_rate"] == 0.0
    assert figures("--max-running-requests", "2")["most_rows"] == 2
    assert figures("--chunked-prefill-size", "100")["tokens_per_step"] <= 100
    assert figures("--disable-overlap-schedule")["ttft_mean"] != plain["ttft_mean"]
    assert figures("--max-total-tokens", "30000")["pool_used"] > plain["pool_used"]
    assert figures("--rate", "0.001")["worst_wait"] < plain["worst_wait"]
    short = figures("--context-length", "5000", "--max-requests", "20")
    assert (short["requests"] + short["dropped"], short["dropped"] > 0) == (20, True)


@pytest.mark.parametrize("sweep", [[], ["--rate", "1,2,4", "--schedule-policy", "lpm,fcfs"]])
def test_a_picture_is_drawn(sweep: list[str], trace: str, profile: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert main(["simulate", "--trace", trace, "--profile", profile, "--plot", str(path), *sweep]) == 0
    assert path.read_bytes().startswith(PNG)


def test_without_matplotlib_the_fault_is_told_before_anything_is_simulated(
    trace: str, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "--trace", trace, "--profile", profile, "--plot", str(tmp_path / "p.png")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "sapwood simulate: --plot: matplotlib is not installed; pip install 'sapwood[plot]'\n"


def test_a_roofline_takes_the_shape_of_a_model_folder(
    trace: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = shape_of(tiny_model)
    assert shape.layer_parameters > 0
    assert shape.context_length == 2048
    given = ["--profile", "h100-llama-8b", "--model", str(tiny_model), "--context-length", "20000"]
    assert main(["simulate", "--trace", trace, *given]) == 0
    assert "24 of 24 served" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--profile", "abacus-llama-8b"], "abacus-llama-8b"),
        (["--page-size", "16,many"], "--page-size"),
        (["--page-size", "0"], "--page-size 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--rate", "-1"], "--rate -1"),
        (["--schedule-policy", "lpm,lottery"], "lottery"),
        (["--max-requests", "0"], "--max-requests 0"),
        (["--tenants", "-1"], "--tenants -1"),
        (["--context-length", "10"], "no request fits into 10 tokens"),
        (["--max-total-tokens", "40"], "no request fits into 32 tokens"),
        (["--csv", "no/such/folder/f.csv"], "--csv no/such/folder/f.csv"),
        (["--plot", "no/such/folder/f.png"], "--plot no/such/folder/f.png"),
        (["--plot", "picture.of.nothing"], "--plot picture.of.nothing"),
        (["--model", "."], "--model"),
    ],
)
def test_a_fault_is_told_in_one_line(
    flags: list[str], said: str, trace: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--trace": trace, "--profile": profile} | dict(zip(flags[::2], flags[1::2], strict=True))
    assert main(["simulate", *[word for pair in given.items() for word in pair]]) == 1
    told = capsys.readouterr().err.splitlines()
    # A sweep tells how far it is.
    told = [line for line in told if not line.endswith(" s")]
    assert len(told) == 1
    assert told[0].startswith("sapwood simulate: ")
    assert said in told[0]


def test_a_real_executor_is_measured_and_what_was_measured_can_be_simulated(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, recording = tmp_path / "tiny.json", tmp_path / "run.jsonl"
    flags = ["--chunked-prefill-size", "32", "--max-running-requests", "4", "--context-length", "256", "--repeats", "1"]
    assert main(["profile", "--model", str(tiny_model), "--output", str(path), *flags]) == 0
    told = capsys.readouterr().out
    assert "the fit misses a step's time by" in told
    made = read_profile(path)
    assert isinstance(made, Fitted)
    assert made.facts["model"] == tiny_model.name
    assert len(made.points) >= 10
    assert {tokens for _, _, tokens, _, _, _ in made.points} >= {1, 2, 4, 32}
    # Every figure of the fit is of the order of what was measured.
    for rows, sampled, tokens, context, pairs, seconds in made.points:
        assert made.seconds(Load(rows, sampled, tokens, context, pairs)) < 100 * seconds
    assert 0.0 < made.scheduling.seconds(4) < 0.1
    write_recording(recording, [RecordedRow(0.0, [("a", 40)], 5), RecordedRow(0.0, [("a", 30), ("b", 10)], 5)])
    assert main(["simulate", "--trace", str(recording), "--profile", str(path)]) == 0
    assert "2 of 2 served" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--repeats", "0"], "--repeats 0"),
        (["--output", "no/such/folder/p.json"], "--output"),
        (["--threads", "0"], "--threads 0"),
    ],
)
def test_a_fault_of_profile_is_told_in_one_line(
    flags: list[str], said: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--model": str(tiny_model), "--output": str(tmp_path / "p.json")}
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    assert main(["profile", *[word for pair in given.items() for word in pair]]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("sapwood profile: ")
    assert said in told[0]


@pytest.mark.parametrize("command", ["simulate", "profile"])
def test_help_loads_nothing_heavy(command: str) -> None:
    program = (
        f"import sys\nfrom sapwood.cli import main\ntry: main([{command!r}, '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in ('numpy', 'torch', 'matplotlib', 'zmq') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--max-running-requests" in done.stdout


def test_a_measured_profile_says_where_it_was_measured(profile: str) -> None:
    made = read_profile(Path(profile))
    assert msgspec.json.decode(Path(profile).read_bytes())["kind"] == "fitted"
    assert made.pool_tokens == 200_000
