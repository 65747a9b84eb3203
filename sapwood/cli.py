"""The command line: `sapwood serve | chat | simulate | profile | pull | explain | lint | doctor | version`.

Nothing heavy is imported before a command needs it.  What goes wrong is told in one line on standard error, and the
exit code is not 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from sapwood.simulate.flags import add_profile, add_simulate


@dataclass(frozen=True)
class Flag:
    """A flag of `serve`: the field of ServerConfig, other names for it, what it takes, and what it is for.

    `kind`: int, float, str, bool (a switch), or the values to choose from.
    """

    field: str
    kind: type | tuple[str, ...]
    text: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None


SERVE_FLAGS = (
    Flag("model", str, "model to serve: a known name, a folder, a .gguf file or a hub id", ("--model-path",), "MODEL"),
    Flag("served_model_name", str, "name that clients call the model by (default: the last part of MODEL)"),
    Flag("host", str, "address to serve on"),
    Flag("port", int, "port to serve on; 0 takes any that is free"),
    Flag("api_key", str, "key that clients must send (default: $SAPWOOD_API_KEY, or none)"),
    Flag("api_keys_file", str, "file of tenants' keys, a line KEY TENANT for each (default: none)", metavar="FILE"),
    Flag("log_level", ("debug", "info", "warning", "error"), "what to log"),
    Flag("tokenizer_workers", int, "tokenizer processes", ("--tokenizer-worker-num",)),
    Flag("chat_template", str, "file or text of a template to use instead of the model's"),
    Flag("stream_interval", int, "tokens between two events of a stream"),
    Flag("device", ("auto", "cpu"), "where to compute"),
    Flag("dtype", ("auto", "float32", "bfloat16"), "numbers to compute with"),
    Flag("quantization", ("int8", "int4"), "hold the weights in fewer bits than --dtype: faster and less exact"),
    Flag("kv_cache_dtype", ("auto", "bfloat16", "int8"), "numbers to keep K and V in (default: those of --dtype)"),
    Flag("threads", int, "threads of the forward pass (default: every core)"),
    Flag("pin_threads", bool, "keep each of them on a core of its own; not for two servers on the same cores"),
    Flag("attention_backend", ("auto", "native", "torch"), "kernels to use"),
    Flag("context_length", int, "longest prompt and output together (default: the model's)"),
    Flag("page_size", int, "tokens in a page of the KV pool"),
    Flag("max_total_tokens", int, "tokens in the KV pool (default: by memory)"),
    Flag("mem_fraction_static", float, "share of free memory that weights and KV pool may take"),
    Flag("disable_radix_cache", bool, "do not reuse prefixes"),
    Flag("disk_cache_dir", str, "folder to keep prefixes in, for after a restart too (default: none)", (), "DIR"),
    Flag("disk_cache_gb", float, "largest size of that folder, in GB"),
    Flag("disable_exact_history", bool, "tokenize replies anew when they come back, rather than as they were sampled"),
    Flag("public_prefix", str, "file of beginnings of prompts that tenants share (a body a line)", metavar="FILE"),
    Flag(
        "prewarm",
        str,
        "file of prefixes to put into the cache before serving, a body of /cache/prewarm a line",
        (),
        "FILE",
    ),
    Flag("max_pinned_share", float, "share of the pool that pinned prefixes of one namespace may keep; 0: nobody pins"),
    Flag(
        "schedule_policy",
        ("lpm", "fcfs", "priority", "deadline", "dfs-weight", "fair"),
        "order of the waiting requests: longest prefix match, arrival, priority, least slack to the target for the "
        "first token, depth first over shared prefixes, or fair between tenants; nobody waits for ever under any",
    ),
    Flag(
        "radix_eviction_policy",
        ("lru", "lfu", "adaptive"),
        "which cached prefixes go when room is needed: used longest ago, matched least, or least likely to be used "
        "again, as learned from the requests",
    ),
    Flag("chunked_prefill_size", int, "token budget of a step; -1 switches chunking off (default: 512)"),
    Flag("max_running_requests", int, "requests that run at once"),
    Flag("max_queued_requests", int, "requests that may wait; more are refused with 429 (default: no limit)"),
    Flag("max_queued_per_tenant", int, "requests of one tenant that may wait (default: no limit)"),
    Flag("queue_timeout", float, "seconds that a request may wait before it is refused with 503 (default: no limit)"),
    Flag("ttft_target_ms", float, "milliseconds to the first token by which goodput is counted (default: none)"),
    Flag("tpot_target_ms", float, "milliseconds between two tokens of a stream that prompts must leave room for"),
    Flag(
        "preemption_mode",
        ("auto", "recompute", "swap"),
        "what a request that gives way under memory pressure does with its KV: computed again later, or copied to swap "
        "space while there is room there; auto takes what costs less",
    ),
    Flag("swap_space_gb", float, "memory outside the pool for requests that give way; 0 for none"),
    Flag("disable_overlap_schedule", bool, "do not plan the next step while one runs"),
    Flag("random_seed", int, "makes the seeds of requests without one repeatable"),
    Flag("drain_seconds", float, "how long running requests may go on after SIGTERM"),
    Flag("max_body_bytes", int, "largest request body"),
    Flag("record", str, "file to append every accepted request to, for lint; never keys", metavar="FILE"),
)


class OneLineParser(argparse.ArgumentParser):
    """Tells an error in one line rather than with the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the parsed `run` is what to do."""
    parser = OneLineParser(
        prog="sapwood", description="An LLM serving runtime that never computes the same prefix twice."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser, metavar="COMMAND")
    _add_serve(_command(commands, "serve", "serve a model over HTTP", run_serve))
    _add_chat(_command(commands, "chat", "talk to the model of a running server", run_chat))
    add_simulate(_command(commands, "simulate", "run a trace through the scheduler on a virtual machine", run_simulate))
    add_profile(_command(commands, "profile", "measure a model's step times for simulate", run_profile))
    pull = _command(commands, "pull", "fetch and convert a model", run_pull)
    pull.add_argument("model", help="a known name, such as smollm2; a .gguf file or a hub id is fetched as well")
    _add_explain(_command(commands, "explain", "show where the prompts of two requests part", run_explain))
    _add_lint(_command(commands, "lint", "show what keeps requests from sharing prefixes", run_lint))
    _command(commands, "doctor", "show what this machine and installation look like", run_doctor)
    _command(commands, "version", "show the version", run_version)
    return parser


def _command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from srt.config import ServerConfig

    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}
    for flag in SERVE_FLAGS:
        names = (f"--{flag.field.replace('_', '-')}", *flag.aliases)
        default = defaults[flag.field]
        shown = "" if default in (None, False, msgspec.NODEFAULT) else f" (default: {default})"
        settings: dict[str, Any] = {"dest": flag.field, "help": flag.text + shown, "default": argparse.SUPPRESS}
        if flag.kind is bool:
            parser.add_argument(*names, action="store_true", **settings)
        elif isinstance(flag.kind, tuple):
            parser.add_argument(*names, choices=flag.kind, **settings)
        else:
            metavar = flag.metavar or {int: "N", float: "X"}.get(flag.kind, "TEXT")
            parser.add_argument(*names, type=flag.kind, metavar=metavar, required=flag.field == "model", **settings)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default=None, help="its key (default: $SAPWOOD_API_KEY)")
    parser.add_argument("--model", default=None, help="model to ask for (default: the server's)")
    parser.add_argument("--system", default=None, help="system message to begin with")
    parser.add_argument("--temperature", type=float, default=None, help="sampling temperature")
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    parser.add_argument("--seed", type=int, default=None, help="makes answers repeatable")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A.json", help="body of a request")
    parser.add_argument("second", metavar="B.json", help="body of a later one")
    _add_text_model(parser)
    parser.epilog = "Exit code: 0 when B's prompt begins with all of A's, 1 when they part before, 2 for an error."


def _add_lint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.jsonl", help="request bodies, or what `serve --record` wrote")
    _add_text_model(parser)


def _add_text_model(parser: argparse.ArgumentParser) -> None:
    """What makes tokens of the requests."""
    parser.add_argument("--model", required=True, help="model whose tokenizer and chat template to use")
    parser.add_argument("--chat-template", default=None, help="file or text of a template instead of the model's")


def run_serve(arguments: argparse.Namespace) -> int:
    """`sapwood serve`."""
    from sapwood.serve import serve
    from srt.config import ServerConfig

    given = {flag.field: getattr(arguments, flag.field) for flag in SERVE_FLAGS if hasattr(arguments, flag.field)}
    given.setdefault("api_key", os.environ.get("SAPWOOD_API_KEY") or None)
    return serve(ServerConfig(**given))


def run_chat(arguments: argparse.Namespace) -> int:
    """`sapwood chat`."""
    from sapwood.chat import ChatFailed, ChatSettings, chat

    settings = ChatSettings(
        url=arguments.url,
        api_key=arguments.api_key or os.environ.get("SAPWOOD_API_KEY"),
        model=arguments.model,
        system=arguments.system,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    try:
        return chat(settings)
    except ChatFailed as error:
        return _complain(f"sapwood chat: {error}")


def run_simulate(arguments: argparse.Namespace) -> int:
    """`sapwood simulate`."""
    from sapwood.simulate.command import run

    return run(arguments)


def run_profile(arguments: argparse.Namespace) -> int:
    """`sapwood profile`."""
    from sapwood.profile import run

    return run(arguments)


def run_pull(arguments: argparse.Namespace) -> int:
    """`sapwood pull`."""
    from sapwood.pull import resolve_model

    print(resolve_model(arguments.model, pull=True))
    return 0


def run_explain(arguments: argparse.Namespace) -> int:
    """`sapwood explain`."""
    from pathlib import Path

    from sapwood.explain import explain
    from sapwood.pull import resolve_model
    from srt.child import StartError

    try:
        model = resolve_model(arguments.model)
        return explain(Path(arguments.first), Path(arguments.second), model, arguments.chat_template)
    except StartError as error:
        # 1 is an answer here.
        _complain(f"sapwood explain: {error}")
        return 2


def run_lint(arguments: argparse.Namespace) -> int:
    """`sapwood lint`."""
    from pathlib import Path

    from sapwood.lint import lint
    from sapwood.pull import resolve_model

    return lint(Path(arguments.file), resolve_model(arguments.model), arguments.chat_template)


def run_doctor(arguments: argparse.Namespace) -> int:
    """`sapwood doctor`."""
    from sapwood.doctor import doctor

    return doctor()


def run_version(arguments: argparse.Namespace) -> int:
    """`sapwood version`."""
    from importlib.metadata import version

    print(f"sapwood {version('sapwood')}")
    return 0


def _complain(line: str) -> int:
    print(line, file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = build_parser().parse_args(argv)
    from srt.child import StartError

    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except StartError as error:
        return _complain(f"sapwood {arguments.command}: {error}")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
