"""The forward worker: runs plans one after another on a thread of its own, so that planning overlaps computing.

    scheduler thread   plan n+1 ........ wait n, commit n   plan n+2 ........
    worker thread      [ step n: close, open, copy, forward, sample ][ step n+1 ...

`build_executor` makes one for a scheduler process: it reads the model and chooses what computes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import torch

from srt.child import Phases, StartError
from srt.config import SchedulerConfig
from srt.model.config import DTYPE_BYTES, KV_DTYPES, ModelConfig, UnsupportedModel, read_model_config
from srt.model.draw import Chooser
from srt.model.interface import LanguageModel
from srt.model.kv_pool import TorchKVPool
from srt.model.llama import TorchModel
from srt.model.native import QUANTIZATIONS, Kernels, NativeModel, NativeUnavailable, load_kernels
from srt.model.native_sampling import NativeChooser
from srt.model.pinning import cores_for, pin_this_thread
from srt.model.step import StepRunner
from srt.model.weights import load_weights
from srt.plan import PageMemory, Plan, StepResult

log = logging.getLogger("sapwood.model")


class WorkerHandle:
    """Implements `srt.plan.StepHandle`.  A lock is all that two threads need: it is held until the step is done."""

    __slots__ = ("_done", "_outcome", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._outcome: StepResult | BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self, step: Callable[[Plan], StepResult]) -> None:
        """Carry the step out; called once, on any thread."""
        try:
            self._outcome = step(self._plan)
        except BaseException as error:
            self._outcome = error
        finally:
            self._done.release()

    def wait(self) -> StepResult:
        """Block until the step is done.  Raises what the step raised."""
        with self._done:
            pass
        if isinstance(self._outcome, StepResult):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome


class ForwardWorker:
    """Implements `srt.plan.Executor` for a model that computes in this process.

    With `overlap` off, `launch` runs the step before it returns; results are the same.  `threads`: how many the
    tensor library may use for one operation, None to leave that as it is.  `chooser`: what picks the tokens, torch
    unless it is given.  `core`: where the thread that runs the steps is to stay.  `memory`: the pages that plans name.
    """

    def __init__(
        self,
        model: LanguageModel,
        overlap: bool = True,
        threads: int | None = None,
        chooser: Chooser | None = None,
        core: int | None = None,
    ) -> None:
        self._steps = StepRunner(model, chooser)
        self.memory: PageMemory = model.kv
        self._queue: SimpleQueue[WorkerHandle | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if overlap:
            # A process that ends without `close` does not wait for a step.
            self._thread = threading.Thread(target=self._work, args=(threads, core), name="forward", daemon=True)
            self._thread.start()
        else:
            _set_threads(threads, core)

    def launch(self, plan: Plan) -> WorkerHandle:
        """Queue a step behind those launched before.  A step that fails does not keep later ones from running."""
        handle = WorkerHandle(plan)
        if self._thread is not None:
            self._queue.put(handle)
        else:
            handle.run(self._steps.run)
        return handle

    def _work(self, threads: int | None, core: int | None) -> None:
        _set_threads(threads, core)
        while (handle := self._queue.get()) is not None:
            handle.run(self._steps.run)

    def close(self) -> None:
        """Finish what is queued and end the thread.  Again: nothing."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def _set_threads(threads: int | None, core: int | None) -> None:
    # OpenMP keeps this per thread: it counts for the thread that computes.
    if threads is not None:
        torch.set_num_threads(threads)
    if core is not None:
        pin_this_thread(core)


def build_executor(config: SchedulerConfig, phases: Phases) -> ForwardWorker:
    """The worker with its model loaded.  Raises StartError, in one line, when that cannot be."""
    if config.device != "cpu":
        raise StartError(f"--device {config.device}: this version computes on the CPU only, choose cpu")
    if config.dtype not in DTYPE_BYTES:
        raise StartError(f"--dtype {config.dtype}: choose one of {', '.join(DTYPE_BYTES)}")
    if config.kv_dtype not in (None, *KV_DTYPES):
        raise StartError(f"--kv-cache-dtype {config.kv_dtype}: choose one of auto, {', '.join(KV_DTYPES)}")
    torch.set_num_threads(config.threads)
    try:
        model_config = read_model_config(Path(config.model.path))
        with phases("kernels"):
            kernels = choose_kernels(config.attention_backend, config.dtype, config.quantization, config.kv_dtype)
        cores = choose_cores(config, kernels)
        with phases("weights"):
            model = load_model(config, model_config, kernels, cores)
    except UnsupportedModel as error:
        raise StartError(str(error)) from error
    # The kernels have threads of their own; torch's would only be in their way between two steps.
    if isinstance(model, NativeModel):
        return ForwardWorker(model, config.overlap, 1, NativeChooser(model), cores[0] if cores else None)
    return ForwardWorker(model, config.overlap, config.threads)


def choose_kernels(
    attention_backend: str, dtype: str, quantization: str | None = None, kv_dtype: str | None = None
) -> Kernels | None:
    """The native kernels where they are wanted and can be had, None for plain torch.  Raises StartError."""
    if quantization not in (None, *QUANTIZATIONS):
        raise StartError(f"--quantization {quantization}: choose {' or '.join(QUANTIZATIONS)}, or leave it out")
    if attention_backend == "torch":
        if quantization is not None:
            raise StartError(f"--quantization {quantization}: only the native kernels do that, not torch")
        return None
    if attention_backend not in ("auto", "native"):
        raise StartError(f"--attention-backend {attention_backend}: not for a CPU, choose auto, native or torch")
    try:
        return load_kernels(dtype, None, quantization, kv_dtype)
    except NativeUnavailable as error:
        if quantization is not None:
            raise StartError(f"--quantization {quantization}: needs the native kernels: {error}") from error
        if attention_backend == "native":
            raise StartError(f"--attention-backend native: {error}") from error
        log.warning("computing with plain torch, which is slower: %s", error)
        return None


def choose_cores(config: SchedulerConfig, kernels: Kernels | None) -> list[int]:
    """A core for each thread where they are to be pinned, else none.  Raises StartError."""
    if not config.pin_threads:
        return []
    if kernels is None:
        raise StartError("--pin-threads: only the native kernels do that, not torch")
    try:
        return cores_for(config.threads)
    except ValueError as error:
        raise StartError(f"--pin-threads: {error}") from error


def load_model(
    config: SchedulerConfig, model_config: ModelConfig, kernels: Kernels | None, cores: Sequence[int] = ()
) -> LanguageModel:
    """The model with its weights and its page pool; `cores`: of its threads.  Raises BrokenModelFolder."""
    folder, dtype = Path(config.model.path), getattr(torch, config.dtype)
    if kernels is not None:
        return NativeModel(
            model_config,
            folder,
            dtype,
            config.num_pages,
            config.page_size,
            config.threads,
            kernels=kernels,
            cores=cores[1:],
        )
    kv_dtype = None if config.kv_dtype is None else getattr(torch, config.kv_dtype)
    pool = TorchKVPool(model_config, dtype, config.num_pages, config.page_size, kv_dtype)
    return TorchModel(model_config, load_weights(folder, model_config, dtype), pool)
