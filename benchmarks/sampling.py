"""What choosing the tokens of a step costs: the native sampler beside torch's, in processor time.

    python -m benchmarks.sampling --model smollm2

The vocabulary is the model's; logits are random.  Processor time of all threads counts, so that other work on the
machine does not; the least of the rounds is printed, both samplers in turn.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from sapwood.pull import resolve_model
from srt.messages import SamplingParams
from srt.model.config import read_model_config
from srt.model.draw import Chooser, TorchChooser
from srt.model.native import NativeModel
from srt.model.native_sampling import NativeChooser
from srt.model.sampler import Sampler
from srt.plan import SlotOpen

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
}


def sampler_for(chooser: Chooser, vocab: int, rows: int, sampling: SamplingParams) -> Sampler:
    """A sampler with a slot open for each row."""
    sampler = Sampler(vocab, chooser)
    nothing = np.array([], np.int32)
    for slot in range(rows):
        sampler.open(SlotOpen(slot=slot, sampling=sampling, seed=slot, prompt_ids=nothing, output_ids=nothing))
    return sampler


def milliseconds(sampler: Sampler, logits: torch.Tensor) -> float:
    """Processor time of one step's sampling."""
    slots, positions = list(range(len(logits))), np.zeros(len(logits), np.int32)
    begin = time.process_time()
    sampler.sample(logits, slots, positions)
    return (time.process_time() - begin) * 1e3


@torch.inference_mode()
def main() -> None:
    """Measure every setting at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    # As in the server: the kernels have threads of their own.
    torch.set_num_threads(1)
    folder = resolve_model(arguments.model)
    config = read_model_config(folder)
    native = NativeChooser(NativeModel(config, folder, torch.bfloat16, 1, 16, 1))
    choosers: dict[str, Chooser] = {"torch": TorchChooser(), "native": native}
    print(f"vocabulary of {config.vocab_size}; ms of processor time for a step")
    for name, sampling in SETTINGS.items():
        for rows in arguments.rows:
            logits = torch.randn(rows, config.vocab_size) * 3
            samplers = {
                kind: sampler_for(chooser, config.vocab_size, rows, sampling) for kind, chooser in choosers.items()
            }
            least = dict.fromkeys(samplers, float("inf"))
            for _ in range(arguments.rounds):
                for kind, sampler in samplers.items():
                    least[kind] = min(least[kind], milliseconds(sampler, logits))
            print(f"{name:<12} {rows:3d} rows: torch {least['torch']:7.3f}, native {least['native']:7.3f}", flush=True)


if __name__ == "__main__":
    main()
