"""Made-up machines that the tests of the doctor examine."""

import contextlib
from pathlib import Path

import torch

from megatron_fssdp.cli.doctor import devices, examination
from megatron_fssdp.cli.doctor.devices import Finding, Gpus
from megatron_fssdp.cli.doctor.examination import InstalledPackage

HERE = "/site-packages/[it]"
DEFAULTS = {"gpus": "0", "cores": "2", "python": "3.12.1", "torch": "2.6.0", "megatron": "0.19.2", "te": ""}
MODULES = {"torch": "torch", "megatron.core": "megatron", "transformer_engine": "te"}


def pose(monkeypatch, machine=""):
    """Make the doctor find another machine, by default a healthy one with two CPU cores and no GPU.

    The machine has words ``key=value``: environment variables (others that the doctor reads are not set); the
    number of ``gpus``, or their error; the number of ``cores``; the CUDA version of torch's ``build``, if
    there is an NVIDIA driver; the versions of ``python``, ``torch``, ``megatron`` and ``te``, empty for
    missing packages, with ``!ERROR`` if the import fails. Other words are returned, by key.
    """
    words = {key: value for key, _, value in (word.partition("=") for word in machine.split())}
    facts = {key: words.pop(key, default) for key, default in DEFAULTS.items()}
    build = words.pop("build", None)
    for name in ("MEGATRON_FSSDP_DEVICE", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in filter(str.isupper, list(words)):
        monkeypatch.setenv(name, words.pop(name))
    gpus = Gpus(error=facts["gpus"])
    if facts["gpus"].isdigit():
        gpus = Gpus((("NVIDIA H100 80GB HBM3", 80 << 30),) * int(facts["gpus"]))
    monkeypatch.setattr(examination, "look_at_gpus", lambda: gpus)
    monkeypatch.setattr(examination, "look_for", lambda name, *_: installed(facts[MODULES[name]]))
    monkeypatch.setattr(examination, "quiet_output", contextlib.nullcontext)
    monkeypatch.setattr(examination.platform, "python_version", lambda: facts["python"])
    monkeypatch.setattr(examination, "check_kernels", lambda: Finding("planning kernels", ""))
    monkeypatch.setattr(devices, "usable_cores", lambda: int(facts["cores"]))
    monkeypatch.setattr(devices, "_NVIDIA_DRIVER", Path("/no/such/driver" if build is None else "/"))
    monkeypatch.setattr(torch.version, "cuda", build or None)
    return words


def installed(text):
    if not text:
        return InstalledPackage()
    version, _, error = text.partition("!")
    return InstalledPackage(version, HERE, error)
