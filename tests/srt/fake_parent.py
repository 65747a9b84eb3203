"""A process that runs a front over fake workers with streams in hand, to be killed by a test.

Prints one line, the pids of its workers as JSON, once tokens flow; then goes on until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from srt.front import Ask
from srt.messages import SamplingParams, TextPrompt
from tests.srt.fakes import fake_front


async def main() -> None:
    """Stream for ever."""
    async with fake_front(tokenizer_workers=2) as front:
        answers = [front.ask(Ask(TextPrompt("for ever"), SamplingParams())) for _ in range(8)]
        # An iterator that is let go ends its request, and this program would end by itself.
        streams = [aiter(answer) for answer in answers]
        for stream in streams:
            await anext(stream)
        print(json.dumps(front.worker_pids()), flush=True)
        await asyncio.Event().wait()
        del streams


# A shell that starts something in the background lets it ignore SIGINT, and with it everything below.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
