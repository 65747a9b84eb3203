"""The command line: every setting has its flag, help is light, faults are told in one line."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sapwood.cli import SERVE_FLAGS, build_parser, main
from sapwood.serve import bind, url_of
from srt.child import StartError
from srt.config import ServerConfig

HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "httpx", "zmq", "numpy", "uvloop")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sapwood.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *arguments])


def test_every_setting_has_its_flag_in_the_order_of_the_configuration() -> None:
    assert [flag.field for flag in SERVE_FLAGS] == list(ServerConfig.__struct_fields__)


def test_what_is_not_given_is_left_to_the_configuration() -> None:
    assert set(vars(parse("--model", "m"))) == {"model", "command", "run"}


@pytest.mark.parametrize("field", msgspec.structs.fields(ServerConfig), ids=lambda field: field.name)
def test_a_flag_sets_its_field_to_a_value_of_its_type(field: msgspec.structs.FieldInfo) -> None:
    (flag,) = [flag for flag in SERVE_FLAGS if flag.field == field.name]
    name = "--" + field.name.replace("_", "-")
    value = flag.kind[-1] if isinstance(flag.kind, tuple) else "7"
    given = parse("--model", "m", name, *([] if flag.kind is bool else [value]))
    config = msgspec.convert({"model": "m", field.name: getattr(given, field.name)}, ServerConfig)
    assert getattr(config, field.name) != field.default


@pytest.mark.parametrize(
    ("alias", "field", "value"),
    [("--model-path", "model", "m"), ("--tokenizer-worker-num", "tokenizer_workers", 3)],
)
def test_names_that_are_known_from_elsewhere_work(alias: str, field: str, value: object) -> None:
    given = parse(*([] if field == "model" else ["--model", "m"]), alias, str(value))
    assert getattr(given, field) == value


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["chat", "--help"], ["version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom sapwood.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "sapwood" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "--model"),
        (["serve", "--model", "m", "--port", "many"], "--port"),
        (["serve", "--model", "m", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--model", "m", "--page", "3"], "--page"),
        (["serve", "--model", "m", "--dtype", "int3"], "--dtype"),
        (["serve", "--model", "nowhere/at/all", "--port", "0"], "nowhere/at/all"),
        (["serve", "--model", ".", "--port", "0"], "not a model folder"),
        (["serve", "--model", ".", "--host", "no.such.host.invalid", "--port", "0"], "--host"),
        (["pull", "no-such-model"], "no-such-model"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["dance"], "dance"),
        ([], "COMMAND"),
    ],
)
def test_a_fault_is_told_in_one_line_and_the_exit_code_is_not_0(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = run(*arguments, SAPWOOD_HOME=str(tmp_path))
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stderr.startswith("sapwood")


def test_a_taken_port_is_noticed_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "nowhere", "--port", str(port)]) == 1
    assert f"cannot serve on 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err


def test_port_0_is_any_free_one_and_the_url_says_which() -> None:
    with bind("127.0.0.1", 0) as first, bind("0.0.0.0", 0) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{first.getsockname()[1]}"
        assert url_of(second) == f"http://127.0.0.1:{second.getsockname()[1]}"


def test_a_port_that_was_in_use_a_moment_ago_can_be_had_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = listener.accept()
            connection.close()
    bind("127.0.0.1", port).close()


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(StartError, match="cannot serve on"):
        bind("192.0.2.1", 0)


def test_doctor_reports_and_ends_well(tmp_path: Path) -> None:
    done = run("doctor", SAPWOOD_HOME=str(tmp_path))
    assert done.returncode == 0
    for title in ("Machine", "Packages", "Kernels", "Models", "Run folders"):
        assert title in done.stdout.splitlines()
    assert "sapwood pull smollm2" in done.stdout
