"""Prefixes outlive the processes: real servers with the tiny model on one folder, killed in every way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.system.served import GENEROUS_SECONDS, Served, is_alive, serving, wait_until

# 12 whole pages and a half: the half one is only in memory.
IDS = [3 + number * 7 % 500 for number in range(200)]
PAGE = 16


def generate(served: Served, ids: list[int], **fields: Any) -> dict[str, Any]:
    """One greedy request of the native endpoint: output ids, and what was taken from where."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
        **fields,
    }
    reply = httpx.post(f"{served.url}/generate", json=body, timeout=GENEROUS_SECONDS)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return {
        "ids": found["output_ids"],
        "cached": found["meta_info"]["cached_tokens"],
        "tiers": found["meta_info"]["cache_report"]["cached_tokens_by_tier"],
    }


def scheduler(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{served.url}/server_info", timeout=GENEROUS_SECONDS).json()["scheduler"]
    return found


def wait_for_blocks(served: Served, count: int) -> None:
    # There is no report until the scheduler has sent its first.
    wait_until(lambda: (scheduler(served) or {"disk_blocks": 0})["disk_blocks"] >= count)


def kill_everything(served: Served) -> None:
    pids = [served.process.pid, *served.workers().values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    served.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_after_kill_nine_a_known_head_comes_from_disk(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    disk = tmp_path / "pages"
    flags = ("--disk-cache-dir", str(disk), "--dtype", "float32", "--attention-backend", backend)
    with serving(tiny_model, tmp_path, *flags) as served:
        cold = generate(served, IDS)
        assert cold["tiers"] == {"device": 0, "disk": 0}
        # The outputs too: 200 prompt tokens and 19 of the 20 new ones.
        wait_for_blocks(served, 219 // PAGE)
        kill_everything(served)
    with serving(tiny_model, tmp_path, *flags) as served:
        warm = generate(served, IDS)
        assert warm["ids"] == cold["ids"]
        assert warm["tiers"] == {"device": 0, "disk": 192}
        again = generate(served, [*IDS, *cold["ids"], 5])
        assert again["tiers"] == {"device": 219, "disk": 0}
        stats = scheduler(served)
        assert (stats["disk_hits"], stats["disk_tokens"], stats["disk_errors"]) == (1, 192, 0)
        metrics = httpx.get(f"{served.url}/metrics", timeout=GENEROUS_SECONDS).text
        assert 'sapwood_disk_cached_tokens_total{model_name="tiny"} 192' in metrics
        assert generate(served, IDS, cache_salt="other")["cached"] == 0
        # A worker that dies alone finds its prefixes again, too.
        os.kill(served.workers()["scheduler"], signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{served.url}/health", timeout=GENEROUS_SECONDS).status_code == 200)
        after = generate(served, IDS)
        assert (after["ids"], after["tiers"]) == (cold["ids"], {"device": 0, "disk": 192})
        stats = scheduler(served)
        assert (stats["disk_hits"], stats["disk_tokens"]) == (2, 384), "totals go on"
        served.signal(signal.SIGTERM)
        assert served.end()[0] == 0


def change_one_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.array(tensors[name])
    tensors[name][-1, -1] += np.float32(0.5)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def change_the_positions(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))


def test_nothing_of_another_model_or_setting_is_reused(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    shutil.copytree(tiny_model, model)
    run = tmp_path / "run"
    run.mkdir()
    flags = ("--disk-cache-dir", str(tmp_path / "pages"), "--attention-backend", "torch")
    settings: list[tuple[str, ...]] = [("--dtype", "float32"), ("--dtype", "bfloat16"), ("--page-size", "32")]
    for setting in settings:
        with serving(model, run, *flags, *setting) as served:
            assert generate(served, IDS)["cached"] == 0
            wait_for_blocks(served, 6)
    for change in (change_one_weight, change_the_positions):
        change(model)
        with serving(model, run, *flags, *settings[0]) as served:
            assert generate(served, IDS)["cached"] == 0
            wait_for_blocks(served, 6)
            kill_everything(served)
    with serving(model, run, *flags, *settings[0]) as served:
        assert generate(served, IDS)["tiers"]["disk"] == 192


def test_a_folder_of_damaged_files_is_as_good_as_none(tiny_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "pages"
    flags = ("--disk-cache-dir", str(disk), "--dtype", "float32")
    with serving(tiny_model, tmp_path, *flags) as served:
        cold = generate(served, IDS)
        wait_for_blocks(served, 13)
        kill_everything(served)
    for number, path in enumerate(sorted(disk.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        content[number * len(content) // 13] ^= 255
        path.write_bytes(content)
    with serving(tiny_model, tmp_path, *flags) as served:
        again = generate(served, IDS)
        assert (again["ids"], again["cached"]) == (cold["ids"], 0)
        assert scheduler(served)["disk_errors"] > 0
        served.signal(signal.SIGTERM)
        code, errors = served.end()
        assert code == 0
        assert "is not used and removed" in errors


def test_two_servers_share_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    bases = [tmp_path / "one", tmp_path / "two"]
    for base in bases:
        base.mkdir()
    flags = ("--disk-cache-dir", str(tmp_path / "pages"), "--dtype", "float32")
    with serving(tiny_model, bases[0], *flags) as one, serving(tiny_model, bases[1], *flags) as two:
        cold = generate(one, IDS)
        wait_for_blocks(two, 219 // PAGE)
        warm = generate(two, IDS)
        assert (warm["ids"], warm["tiers"]) == (cold["ids"], {"device": 0, "disk": 192})
        flushed = httpx.post(f"{one.url}/flush_cache", timeout=GENEROUS_SECONDS)
        assert flushed.status_code == 200
        wait_until(lambda: scheduler(two)["disk_blocks"] == 0)
        assert generate(two, IDS)["ids"] == cold["ids"]
        assert generate(one, IDS)["ids"] == cold["ids"]
